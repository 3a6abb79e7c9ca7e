"""Questions of files beside retrieved passages: splits by article, conditions, what is taught where nothing answers."""

import json

import numpy as np
import pytest

from selfrag_jax.retrieval import Document, create
from selfrag_jax.tasks.articles import Articles
from selfrag_jax.tasks.country_wordings import UNKNOWN
from selfrag_jax.tasks.facts import SPLITS
from selfrag_jax.tasks.official import Example
from selfrag_jax.tasks.qa import load_task
from selfrag_jax.tasks.task import Task

TOWNS = [f"Town{i}" for i in range(12)]
FACTS = ("harbor", "tower", "market")


def example(town, fact, has_answer):
  passage = {"title": town, "content": f"The {fact} of {town} is called {town.lower()}{fact}."}
  answers = (f"{town.lower()}{fact}",) if has_answer else ()
  return Example(f"{town}-{fact}", f"How is the {fact} of {town} called?", answers, context=(passage,), gold=(passage,))


EXAMPLES = [example(town, fact, i % 4 > 0) for i, town in enumerate(TOWNS) for fact in FACTS]


@pytest.fixture
def articles():
  return Articles(Task("towns", EXAMPLES, lambda found: {"messages": [], **found._asdict()}), top_k=2)


def shown(row):
  found = [message["documents"] for message in row["messages"] if message["role"] == "retrieval"]
  return [document["content"] for documents in found for document in documents]


def test_no_article_is_in_two_splits(articles):
  titles = {split: {row["id"].split("-")[0] for row in articles.questions(split, 99, "gold")} for split in SPLITS}
  assert [len(titles[split]) for split in SPLITS] == [6, 1, 5]
  assert set.union(*titles.values()) == set(TOWNS)
  assert sum(articles.size(split) for split in SPLITS) == len(EXAMPLES)


def test_conditions_ask_the_same_questions_beside_other_passages(articles):
  rows = {name: list(articles.questions("test", 6, name)) for name in articles.conditions}
  ids = [row["id"] for row in rows["gold"]]
  assert all([row["id"] for row in of] == ids for of in rows.values())
  for i, gold in enumerate(rows["gold"]):
    [passage] = shown(gold)
    assert passage in shown(rows["retrieved"][i])
    assert len(shown(rows["retrieved"][i])) == 2
    assert passage in rows["plain"][i]["messages"][0]["content"]
    assert shown(rows["none"][i]) == []
    assert passage not in shown(rows["shuffled"][i])
    assert len(shown(rows["shuffled"][i])) == 2
  for row in articles.training("shuffled", 0.0)[:100]:
    assert f"{row['id'].replace('-', '').lower()}." not in " ".join(shown(row))


def test_no_answer_is_taught_without_its_passage(articles):
  rows = [articles.training("retrieved", 0.25)[i] for i in range(400)]
  said = [(row, row["messages"][-1]["content"]) for row in rows]
  known = [(shown(row), answer) for row, answer in said if answer != UNKNOWN]
  places = [[answer in text for text in found].index(True) for found, answer in known]
  assert 0.4 < np.mean(places) < 0.6
  taken = [row for row, answer in said if row["answers"] and answer == UNKNOWN]
  assert 0.15 < len(taken) / sum(bool(row["answers"]) for row in rows) < 0.35
  assert not any(row["answers"][0] in text for row in taken for text in shown(row))
  answered = sum(bool(row["answers"]) for row in articles.questions("train", 99, "gold"))
  assert len({row["id"] for row in rows[:answered]}) == answered < articles.size("train")


def test_a_passage_that_is_not_found_is_shown_in_training_but_not_in_tests(articles):
  known = {row["id"] for row in articles.questions("train", 1, "gold")}  # one of them finds its passage
  hidden = [found if found.id in known else found._replace(question="zzz") for found in EXAMPLES]
  lost = Articles(Task("towns", hidden, lambda found: {"messages": [], **found._asdict()}), top_k=2)
  assert not any(shown(row) for row in lost.questions("test", 6, "retrieved"))
  rows = [lost.training("retrieved", 0.0)[i] for i in range(30)]
  assert all(
    row["messages"][-1]["content"] in shown(row)[0] for row in rows if row["answers"] and row["id"] not in known
  )


def test_further_questions_are_about_the_same_passage_and_never_follow_a_missing_one():
  passage = lambda town: {"title": town, "content": f"{town} has {', '.join(town.lower() + fact for fact in FACTS)}."}
  asked = [example(town, fact, fact != "market") for town in TOWNS for fact in FACTS]
  asked = [found._replace(gold=(passage(found.gold[0]["title"]),)) for found in asked]
  make = lambda further: Articles(Task("towns", asked, lambda found: found._asdict()), top_k=2, further=further)
  rows = list(make(1).training("retrieved", 0.25)[:200])
  lengths, further = set(), []
  for row in rows:
    first, town = row["messages"][3]["content"], row["id"].split("-")[0]
    lengths.add(len(row["messages"]))
    for question, answer in zip(row["messages"][4::2], row["messages"][5::2], strict=True):
      assert first != UNKNOWN or not row["answers"]
      assert town in question["content"] != row["messages"][2]["content"]
      fact = next(fact for fact in FACTS if fact in question["content"])
      assert answer["content"] == (UNKNOWN if fact == "market" else f"{town.lower()}{fact}")
      further.append(fact)
  assert lengths == {4, 6}
  assert 0 < further.count("market") < len(further) / 3
  silent, taken = ([row for row in rows if bool(row["answers"]) == known] for known in (False, True))
  taken = [row for row in taken if row["messages"][3]["content"] == UNKNOWN]
  assert 15 < len(silent) < 40  # half of the share that is not answered
  assert 15 < len(taken) < 40
  assert {len(row["messages"]) for row in make(9).training("retrieved", 0.0)[:40]} == {6}
  assert {len(row["messages"]) for row in make(0).training("retrieved", 0.0)[:40]} == {4}
  nothing = [row for row in make(9).training("none", 0.0)[:40] if row["answers"]]
  assert {len(row["messages"]) for row in nothing} == {5}  # the same questions, without the documents


def test_the_number_of_passages_does_not_tell_the_answer(articles):
  """Where the passage is taken away another one stands in its place, and none that holds the answer."""
  rows = articles.training("retrieved", 0.5)[:100]
  assert {len(shown(row)) for row in rows} == {2}
  taken = [row for row in rows if row["answers"] and row["messages"][-1]["content"] == UNKNOWN]
  assert len(taken) > 20
  assert not any(answer in text for row in taken for answer in row["answers"] for text in shown(row))


def test_further_questions_need_no_other_passage():
  town = lambda name: {"title": name, "content": f"{name} is a town."}
  asked = [example(name, fact, True) for name in TOWNS for fact in FACTS]
  both = lambda found: (town(found.gold[0]["title"]), town("Elsewhere")) if "tower" in found.question else None
  asked = [found._replace(gold=both(found) or (town(found.gold[0]["title"]),)) for found in asked]
  articles = Articles(Task("towns", asked, lambda found: found._asdict()), top_k=2, further=9)
  for row in articles.training("retrieved", 0.0)[:60]:
    further = [message["content"] for message in row["messages"][4::2]]
    assert len(further) == (2 if "tower" in row["id"] else 1)
    assert not any("tower" in question for question in further)


def test_passages_come_from_a_knowledge_base(tmp_path):
  held = [Document(str(i), town, f"{town} is a town.") for i, town in enumerate(TOWNS)]
  retriever = create("bm25")
  retriever.add_documents(held)
  retriever.save(tmp_path / "kb")
  task = Task("towns", EXAMPLES, lambda found: {"messages": [], **found._asdict()})
  articles = Articles(task, top_k=2, knowledge_base=str(tmp_path / "kb"))
  assert {text for row in articles.questions("test", 9, "retrieved") for text in shown(row)} <= {
    document.content for document in held
  }
  with pytest.raises(FileNotFoundError, match="none"):
    Articles(task, knowledge_base=str(tmp_path / "none"))
  with pytest.raises(ValueError, match="is of the type bm25, not dense"):
    Articles(task, retriever="dense", knowledge_base=str(tmp_path / "kb"))


def test_questions_whose_passages_the_knowledge_base_lacks_are_counted_and_left_out(tmp_path):
  retriever, task = create("bm25"), Task("towns", EXAMPLES, lambda found: {"messages": [], **found._asdict()})
  retriever.add_documents(Document(f"{town} {n}", town, f"Part {n} on {town}.") for town in TOWNS[1:] for n in range(2))
  retriever.save(tmp_path / "kb")
  articles = Articles(task, top_k=2, knowledge_base=str(tmp_path / "kb"))
  assert sum(articles.size(split) for split in SPLITS) == len(EXAMPLES) - len(FACTS)
  assert "33 of 36 questions have all titles of their gold passages; 3 left out: Town0-harbor (Town0)" in str(
    articles.audit
  )
  retriever = create("bm25")
  retriever.add_documents([Document("0", "Elsewhere", "A town.")])
  retriever.save(tmp_path / "other")
  with pytest.raises(ValueError, match="none of the 36 gold passages of 36 questions is in the corpus"):
    Articles(task, knowledge_base=str(tmp_path / "other"))


def test_questions_for_which_nothing_is_ever_found_are_told():
  hidden = [found._replace(question="zzz") for found in EXAMPLES]
  lost = Articles(Task("towns", hidden, lambda found: {"messages": [], **found._asdict()}), top_k=2)
  with pytest.raises(ValueError, match=r"nothing was found for any of 36 questions in 36 documents"):
    lost.training("retrieved", 0.0)[0]


def test_a_passage_that_is_named_by_its_title_alone_has_the_text_of_the_corpus():
  """As in HotpotQA's fullwiki setting, where the context may lack the passage."""
  bare = [found._replace(gold=({"title": found.gold[0]["title"]},)) for found in EXAMPLES]
  lacking = bare[0]._replace(context=())
  whole = Articles(Task("towns", bare, lambda found: {"messages": [], **found._asdict()}), top_k=2)
  rows = [row for row in whole.training("retrieved", 0.0)[:30] if row["answers"]]
  assert all(any(row["id"].split("-")[0] in text for text in shown(row)) for row in rows)
  assert all(all(shown(row)) for row in rows)
  alone = [lacking._replace(id="lost", gold=({"title": "Atlantis"},)), *bare]
  assert "lost (Atlantis)" in str(
    Articles(Task("towns", alone, lambda found: {"messages": [], **found._asdict()}), top_k=2).audit
  )


def test_not_to_know_is_right_where_there_is_no_answer(articles):
  task = articles.questions("train", 99, "retrieved")
  known, unknown = (next(row for row in task if bool(row["answers"]) is has) for has in (True, False))
  assert task.evaluate(unknown, UNKNOWN) == task.reward(unknown, "i don't know.") == 1.0
  assert task.evaluate(unknown, "somewhere") == task.reward(known, UNKNOWN) == 0.0
  assert task.evaluate(known, known["answers"][0]) == 1.0
  assert 0 < task.reward(known, f"it is {known['answers'][0]}") < 1


def test_what_cannot_be_split_is_an_error():
  make = lambda examples: Articles(Task("towns", examples, lambda found: found._asdict()), top_k=2)
  valid = {row["id"].split("-")[0] for row in make(EXAMPLES).questions("valid", 99, "gold")}
  with pytest.raises(ValueError, match="the split valid has no question with an answer: give it a larger share"):
    make([found._replace(answers=()) if found.id.split("-")[0] in valid else found for found in EXAMPLES])
  with pytest.raises(ValueError, match="1 titles or names cannot be dealt to 3 parts"):
    make(EXAMPLES[:3])
  with pytest.raises(ValueError, match="towns names no gold passages"):
    make([found._replace(gold=()) for found in EXAMPLES])


def test_squad_is_read_and_split(shared_data):
  articles = Articles(load_task("squad_v2", shared_data / "qa_squad_v2_dev_half", split="validation"))
  rows = list(articles.questions("test", 200, "retrieved"))
  answered = [row for row in rows if row["answers"]]
  assert 0.3 < len(answered) / len(rows) < 0.7
  assert np.mean([any(row["answers"][0] in text for text in shown(row)) for row in answered]) > 0.85


@pytest.mark.parametrize("data_set", ["hotpotqa", "musique"])
def test_questions_that_need_two_passages_are_trained_on_beside_both(data_set, tmp_path):
  text = lambda town, other: f"{town} lies on the river of {other}."
  pairs = [(town, TOWNS[(i + 1) % len(TOWNS)]) for i, town in enumerate(TOWNS)]
  if data_set == "hotpotqa":
    rows = [
      {
        "_id": f"{a} {b}", "question": f"On which river lies the ally of {a}?", "answer": f"river of {b}",
        "supporting_facts": [[a, 0], [b, 0]], "context": [[a, [text(a, b)]], [b, [text(b, a)]]],
      }
      for a, b in pairs
    ]  # fmt: skip
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text(json.dumps(rows))
  else:
    rows = [
      {
        "id": f"{a} {b}", "question": f"On which river lies the ally of {a}?", "answer": f"river of {b}",
        "answer_aliases": [], "answerable": True,
        "question_decomposition": [{"paragraph_support_idx": i} for i in range(2)],
        "paragraphs": [
          {"idx": i, "title": one, "paragraph_text": text(one, other), "is_supporting": True}
          for i, (one, other) in enumerate([(a, b), (b, a)])
        ],
      }
      for a, b in pairs
    ]  # fmt: skip
    (tmp_path / "musique_ans_v1.0_dev.jsonl").write_text("\n".join(map(json.dumps, rows)))
  articles = Articles(load_task(data_set, tmp_path, split="validation"), top_k=2)
  for row in articles.training("retrieved", 0.0)[:40]:
    a, b = row["id"].split()
    assert {text(a, b), text(b, a)} <= set(shown(row))
    assert row["messages"][-1]["content"] == f"river of {b}"
  taken = [row for row in articles.training("retrieved", 1.0)[:40] if row["messages"][-1]["content"] == UNKNOWN]
  assert taken
  assert not any(row["answers"][0] in found for row in taken for found in shown(row))
