"""Three-line files in the official format of every data set, for the tests that read them."""

import csv
import io
import json

from selfrag_jax.tasks.qa import load_task

PARAGRAPH = "The Normans gave their name to Normandy, a region in France."
SQUAD = {
  "version": "v2.0",
  "data": [
    {
      "title": "The_Normans_%28people%29",
      "paragraphs": [
        {
          "context": PARAGRAPH,
          "qas": [
            {
              "id": "s0",
              "question": "Where is Normandy?",
              "answers": [{"text": t, "answer_start": 53} for t in ("France", "in France", "France")],
              "is_impossible": False,
            },
            {
              "id": "s1",
              "question": "Where is Oslo?",
              "answers": [],
              "is_impossible": True,
              "plausible_answers": [{"text": "France", "answer_start": 53}],
            },
            {"id": "s2", "question": "Who?", "answers": [{"text": "The Normans", "answer_start": 0}]},
          ],
        }
      ],
    }
  ],
}
SQUAD_1 = json.loads(json.dumps(SQUAD | {"version": "1.1"}))
SQUAD_1["data"][0]["paragraphs"][0]["qas"][1] = SQUAD["data"][0]["paragraphs"][0]["qas"][2] | {"id": "s3"}
HOTPOT = [
  {
    "_id": f"h{number}",
    "question": "Is Paris on the Seine?",
    "answer": answer,
    "type": "bridge",
    "level": "easy",
    "supporting_facts": [["Paris", 1], ["Seine", 0], ["Paris", 0]],
    "context": [["Oslo", ["Oslo is in Norway."]], ["Paris", ["Paris is a city.", " It is on the  Seine."]]],
  }
  for number, answer in enumerate(("yes", "no", "the Seine"))
]
# sentences do not begin with the space between them, comparisons of bridges have four gold passages, and answers have
# ids in the files of December 2020 and later: none in those of before, null where a comparison has none
WIKI = [
  {
    "_id": "w0",
    "type": "compositional",
    "question": "Where was the director of Red Dust (Film) born?",
    "context": [
      ["Oslo", ["Oslo is in Norway."]],
      ["Ann Lee", ["Ann Lee is a director.", "She was born in Bergen."]],
      ["Red Dust (film)", ["Red Dust is a film of 1990.", "Ann Lee directed it."]],
    ],
    "entity_ids": "Q1_Q2",
    "supporting_facts": [["Red Dust (film)", 1], ["Ann Lee", 1]],
    "evidences": [["Red Dust", "director", "Ann Lee"], ["Ann Lee", "place of birth", "Bergen"]],
    "answer": "Bergen",
    "evidences_id": [["Q1", "director", "Q2"], ["Q2", "place of birth", "Q3"]],
    "answer_id": "Q3",
  },
  {
    "_id": "w1",
    "type": "bridge_comparison",
    "question": "Are the directors of Red Dust and Blue Sea from the same country?",
    "context": [
      [title, [f"{title} is a {kind}.", f"{title} is from Norway."]]
      for title, kind in (("Blue Sea", "film"), ("Bo Dahl", "director"), ("Ann Lee", "director"), ("Red Dust", "film"))
    ],
    "entity_ids": "Q1_Q2_Q4_Q5",
    "supporting_facts": [["Ann Lee", 1], ["Red Dust", 0], ["Bo Dahl", 1], ["Blue Sea", 0], ["Ann Lee", 0]],
    "evidences": [["Ann Lee", "country of citizenship", "Norway"], ["Bo Dahl", "country of citizenship", "Norway"]],
    "answer": "yes",
    "evidences_id": [],
    "answer_id": None,
  },
  {
    "_id": "w2",
    "type": "comparison",
    "question": "Which film came out first, Red Dust or Blue Sea?",
    "context": [["Red Dust", ["It is of 1990."]], ["Blue Sea", ["It is of", "1980."]]],
    "entity_ids": "Q1_Q4",
    "supporting_facts": [["Red Dust", 0], ["Blue Sea", 0]],
    "evidences": [["Red Dust", "publication date", "1990"], ["Blue Sea", "publication date", "1980"]],
    "answer": "Blue Sea",
  },
]
MUSIQUE = [
  {
    "id": "2hop__1_2",
    "question": "Which river crosses the capital of that country?",
    "answer": "the Seine",
    "answer_aliases": ["Seine", "the Seine"],
    "answerable": answerable,
    "paragraphs": [
      {"idx": 7, "title": "Paris", "paragraph_text": "Paris lies on the Seine.", "is_supporting": True},
      {"idx": 3, "title": "France", "paragraph_text": "The capital is Paris.", "is_supporting": True},
      {"idx": 4, "title": "France", "paragraph_text": "France borders Spain.", "is_supporting": False},
    ],
    "question_decomposition": [
      {"id": 1, "question": "capital?", "answer": "Paris", "paragraph_support_idx": 3},
      {"id": 2, "question": "river?", "answer": "the Seine", "paragraph_support_idx": 7 if answerable else None},
    ],
  }
  for answerable in (True, False, True)
]
NQ = [{"question": "who wrote it", "answer": ["Ann", "Ann B", "Ann"]}] * 3
TRIVIA = {
  "Data": [
    {
      "QuestionId": f"t{number}",
      "Question": "Which city?",
      "Answer": {"Value": "Oslo", "Aliases": ["Oslo", "Christiania"], "NormalizedValue": "oslo", "Type": "Entity"},
    }
    for number in range(3)
  ],
  "Domain": "unfiltered-web",
}
POPQA = [["id", "subj", "question", "possible_answers"]] + [
  [str(number), "George", "What is George's job?", '["politician", "pol."]'] for number in range(3)
]
GSM8K = [{"question": "How many?", "answer": "40*27=<<40*27=1080>>1080 clips\n#### 1,080"}] * 3
MMLU = [["What is 1 + 1,\nas a word?", "one", "two", "three", "four", "B"]] * 3
ARC = [
  {
    "id": f"Mercury_{key}",
    "question": {
      "stem": "What is hot?",
      "choices": [{"text": t, "label": x} for t, x in zip(texts, keys, strict=True)],
    },
    "answerKey": key,
  }
  for key, keys, texts in (
    ("C", "ABCD", ["ice", "snow", "fire", "fog"]),
    ("2", "1234", ["ice", "fire", "snow", "fog"]),
    ("E", "ABCDE", ["ice", "snow", "rain", "fog", "fire"]),
  )
]
SMOLTALK = [
  {
    "messages": [
      {"role": "system", "content": "Be short."},
      {"role": "user", "content": "Hi"},
      {"role": "assistant", "content": "Hello"},
    ]
  }
] * 3


def lines(records):
  return "".join(json.dumps(record) + "\n" for record in records)


def rows(records, delimiter=","):
  file = io.StringIO()
  csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows(records)
  return file.getvalue()


def tabs(records):
  return rows(records, "\t")


# name -> the official file of a split, the split, its content, and how it is written
FILES = {
  "squad": ("dev-v1.1.json", "validation", SQUAD_1, json.dumps),
  "squad_v2": ("train-v2.0.json", "train", SQUAD, json.dumps),
  "hotpotqa": ("hotpot_dev_distractor_v1.json", "validation", HOTPOT, json.dumps),
  "hotpotqa_fullwiki": ("hotpot_dev_fullwiki_v1.json", "validation", HOTPOT, json.dumps),
  "2wikimultihopqa": ("dev.json", "validation", WIKI, json.dumps),
  "musique": ("musique_ans_v1.0_dev.jsonl", "validation", MUSIQUE, lines),
  "musique_full": ("musique_full_v1.0_train.jsonl", "train", MUSIQUE, lines),
  "nq_open": ("NQ-open.dev.jsonl", "validation", NQ, lines),
  "triviaqa": ("unfiltered-web-dev.json", "validation", TRIVIA, json.dumps),
  "triviaqa_rc": ("wikipedia-train.json", "train", TRIVIA, json.dumps),
  "popqa": ("popQA.tsv", "test", POPQA, tabs),
  "gsm8k": ("test.jsonl", "test", GSM8K, lines),
  "mmlu": ("val/anatomy_val.csv", "validation", MMLU, rows),
  "arc_easy": ("ARC-Easy-Dev.jsonl", "validation", ARC, lines),
  "arc_challenge": ("ARC-Challenge-Test.jsonl", "test", ARC, lines),
  "smoltalk": ("train.jsonl", "train", SMOLTALK, lines),
}


def write(folder, name, content=None):
  """Write the file of a data set under its official name, with other content if it is given."""
  file, _, records, written = FILES[name]
  (folder / file).parent.mkdir(exist_ok=True)
  (folder / file).write_text(written(records if content is None else content), encoding="utf-8")
  return folder / file


def load(folder, name, content=None):
  write(folder, name, content)
  return load_task(name, folder, split=FILES[name][1])
