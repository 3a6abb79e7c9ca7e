"""Demonstrations over one corpus: no held-out question is trained on, queries use words read before."""

import re
from collections import Counter

import pytest
from few_passages import (
  PASSAGES,
  QUESTION,
  SIZES,
  TOKENIZER,
  exchange,
  folder,
  gold_exchange,
  ids,
  make,
  numbered,
  text_named,
)
from scipy.stats import binomtest

from selfrag_jax.tasks.cloze import bridges
from selfrag_jax.tasks.datasets import Passage, Question, read_qa_folder
from selfrag_jax.tasks.demonstrations import MISS_RATE
from selfrag_jax.tasks.passages import INSTRUCTION, PassageSearch
from selfrag_jax.tasks.search_task import NOTICE, SPLITS
from selfrag_jax.text.chat import COMPACT, document_body, render_conversation


@pytest.fixture(scope="module")
def task():
  return make(numbered(40), seed=3)


def test_gold_queries_name_what_the_question_or_an_earlier_passage_says():
  searches, found, answer = gold_exchange(QUESTION)
  assert found == ["Medici (board game)", "Reiner Knizia", "Illertissen"]
  # the question spells MEDICI and knows nothing of a board game; the other names were read on the way
  assert searches == ["Medici", "Reiner Knizia", "Illertissen"]
  assert answer == "Illertissen"


def test_a_name_counts_only_as_whole_words_and_only_if_it_was_shown():
  for word in ("Good", "Cargo"):
    searches, _, _ = gold_exchange(Question("q", f"{word} game of the OLD old stones?", ("x",), (3,)))
    assert searches == ["game of the OLD stones"]
  # a question that shares no word with its passage still has a query
  assert gold_exchange(Question("q", "Why is it wet?", ("x",), (4,)))[0] == ["Why is it wet"]
  # "read" stands behind the cut of p2: no reader has seen it
  passages = [PASSAGES[2], Passage("r", "End", "The end of all."), *PASSAGES[3:]]
  data = folder([Question(f"q{i}", "What does Illertissen have of all?", ("x",), (0, 1)) for i in range(10)], passages)
  for tokens, second in ((200, "End"), (80, "of all the")):
    task = PassageSearch(data, TOKENIZER, COMPACT, **(SIZES | {"document_tokens": tokens}))
    assert exchange(task.demonstration("sft", 0, "gold", 2))[0] == ["Illertissen", second]


def test_at_most_six_words_the_rarest_ones_of_question_and_reading_in_their_order():
  passages = [
    Passage("a", "A1", "common alpha beta gamma delta epsilon zeta"),
    Passage("b", "B1", "common eta"),
    Passage("c", "C1", "common theta of eta"),
  ]
  text = "common zeta epsilon delta Gamma beta alpha?"
  data = folder([Question(f"q{i}", text, ("x",), (0, 2, 1)) for i in range(10)], passages)
  searches, _, _ = exchange(PassageSearch(data, TOKENIZER, COMPACT, **SIZES).demonstration("train", 0, "gold", 3))
  assert searches[0] == "zeta epsilon delta Gamma beta alpha"
  assert searches[1] == "common"
  # the second passage has told of eta
  assert searches[2] == "common eta"
  short = PassageSearch(data, TOKENIZER, COMPACT, **(SIZES | {"max_query_tokens": 19}))
  assert exchange(short.demonstration("train", 0, "gold", 1))[0] == ["zeta epsilon delta"]


def test_more_gold_passages_than_hops_lose_the_last_ones():
  searches, found, answer = gold_exchange(QUESTION, max_hops=2)
  assert (len(searches), found, answer) == (2, ["Medici (board game)", "Reiner Knizia"], "Illertissen")


def test_a_search_fails_at_times_and_is_tried_again_as_far_as_there_is_room():
  task = make([QUESTION._replace(id=f"q{i}") for i in range(10)])
  gold = [PASSAGES[passage].title for passage in QUESTION.gold]
  words = lambda text: set(re.findall(r"\w+", text.lower()))
  failed, n = Counter(), 300
  for index in range(n):
    searches, found, answer = exchange(task.demonstration("sft", index, "gold", 4))
    assert [title for title in found if title in gold] == gold
    assert len(found) <= 4
    assert answer == "Illertissen"
    read = words(QUESTION.text)
    for hop, (query, title) in enumerate(zip(searches, found, strict=True)):
      assert words(query) <= read
      if title not in gold:
        failed[hop] += 1
        assert found[hop + 1] == gold[hop]
        assert title == max(("Go", "River"), key=lambda other: len(words(query) & words(text_named(other))))
      read |= words(text_named(title))
  # there is room for one; the question has one word of the first passage, and with no less can it be tried
  assert failed[0] == 0
  assert binomtest(failed[1], n, MISS_RATE).pvalue > 1e-3
  assert binomtest(failed[2], n, MISS_RATE * (1 - MISS_RATE)).pvalue > 1e-3
  assert all(exchange(task.demonstration("sft", index, "gold", 3))[1] == gold for index in range(20))


def test_a_share_of_the_demonstrations_asks_about_a_sentence_of_a_passage():
  passages = [
    Passage(f"n{i}", f"Town {i}", f"Short. The market of this old town burned down in {1800 + i} and was built anew.")
    for i in range(30)
  ]
  data = folder([Question(f"q{i}", f"Question {i}?", ("x",), (i,)) for i in range(30)], passages)
  task = PassageSearch(data, TOKENIZER, COMPACT, **(SIZES | {"document_tokens": 200, "cloze": 0.5}))
  asked, n = Counter(), 200
  for index in range(n):
    demonstration = task.demonstration("sft", index, "gold", 1)
    question = demonstration["messages"][1]["content"]
    [query], [found], answer = exchange(demonstration)
    asked[question.startswith("Question")] += 1
    if not question.startswith("Question"):
      [passage] = [passage for passage in passages if passage.title == found]
      # the one sentence that is long enough; its first word is no name
      sentence = "The market of this old town burned down in ___ and was built anew."
      assert question == f"Which words are missing? {sentence}"
      assert answer == passage.text.split()[-5]
      assert set(query.split()) < set(sentence.split())
  assert binomtest(asked[True], n, 0.5).pvalue > 1e-3
  again = PassageSearch(data, TOKENIZER, COMPACT, **(SIZES | {"document_tokens": 200, "cloze": 0.5}))
  assert again.demonstration("sft", 7, "gold", 1) == task.demonstration("sft", 7, "gold", 1)
  nameless = folder(numbered(10), [Passage("p", "Go", "The old game of the stones is played by two.")] * 5)
  task = PassageSearch(nameless, TOKENIZER, COMPACT, **SIZES, cloze=1.0)
  with pytest.raises(ValueError, match=r"no sentence with a name or a number: set data\.cloze = 0"):
    task.demonstration("sft", 0, "gold", 1)
  with pytest.raises(ValueError, match=r"cloze and bridge must be shares in \[0, 1\] .*, got 2 and 0"):
    make(numbered(10), cloze=2)
  with pytest.raises(ValueError, match=r"add up to at most 1, got 0\.6 and 0\.5"):
    make(numbered(10), cloze=0.6, bridge=0.5)


def rivers_and_towns(gold=lambda i: (i,)):
  """Thirty questions over towns and rivers; each river flows through the town with its number."""
  towns = [
    Passage(f"t{i}", f"Town {i}", f"Short. In Town {i} the market burned down in {1800 + i} and was built anew.")
    for i in range(15)
  ]
  rivers = [
    Passage(f"r{i}", f"River {i}", f"It flows through the old Town {i} and then into the sea.") for i in range(15)
  ]
  return folder([Question(f"q{i}", f"Question {i}?", ("x",), gold(i)) for i in range(30)], towns + rivers)


def test_a_share_of_the_demonstrations_reaches_a_passage_by_way_of_another():
  data = rivers_and_towns()
  options = SIZES | {"document_tokens": 200, "bridge": 0.5, "prompt_tokens": 500, "max_query_tokens": 60}
  task, asked, n = PassageSearch(data, TOKENIZER, COMPACT, **options), Counter(), 200
  for index in range(n):
    demonstration = task.demonstration("sft", index, "gold", 2)
    question = demonstration["messages"][1]["content"]
    asked[question.startswith("Question")] += 1
    if not question.startswith("Question"):
      queries, found, answer = exchange(demonstration)
      number = found[0].split()[1]
      assert found == [f"River {number}", f"Town {number}"]
      assert question == (
        "Which words are missing in what is said of …? In … the market burned down in ___ and was built anew. "
        "Of the same it is said: It flows through the old … and then into the sea."
      )
      assert answer == str(1800 + int(number))
      assert set(queries[0].split()) < set(question.split())
      assert queries[1] == f"Town {number}"
  assert binomtest(asked[True], n, 0.5).pvalue > 1e-3
  assert "Question" in task.demonstration("train", 0, "gold", 2)["messages"][1]["content"]


def test_a_question_made_of_passages_finds_first_what_names_the_other_or_what_does_not_help():
  data = rivers_and_towns()
  options = SIZES | {"document_tokens": 200, "bridge": 1.0, "prompt_tokens": 500, "max_query_tokens": 60}
  task, missed, n = PassageSearch(data, TOKENIZER, COMPACT, **options, first_query="question"), 0, 200
  for index in range(n):
    demonstration = task.demonstration("sft", index, "gold", 3)
    queries, found, answer = exchange(demonstration)
    assert queries[0] == demonstration["messages"][1]["content"]
    number = str(int(answer) - 1800)
    wanted = [f"River {number}", f"Town {number}"]
    is_missed = found[0] not in wanted
    assert [title for title in found if title in wanted] == wanted
    assert queries[found.index(wanted[1])] == wanted[1]
    missed += is_missed
    two = exchange(task.demonstration("sft", index, "gold", 2))[1]
    assert two[0].startswith("River")  # two searches leave no room for a miss
    assert two[1] == two[0].replace("River", "Town")
  assert binomtest(missed, n, MISS_RATE).pvalue > 1e-3


def test_no_demonstration_joins_two_passages_that_a_held_out_question_needs():
  data = rivers_and_towns(gold=lambda i: (15 + i % 15, i % 15))  # question i is the bridge of river i % 15
  options = SIZES | {"document_tokens": 200, "bridge": 1.0, "prompt_tokens": 500, "max_query_tokens": 60}
  task = PassageSearch(data, TOKENIZER, COMPACT, **options)
  held = {
    int(slot) for split in ("valid", "test") for slot in task.batch(split, range(task.size(split))).gold[:, 0] - 15
  }
  made = {int(exchange(task.demonstration("sft", index, "gold", 2))[2]) - 1800 for index in range(200)}
  assert held
  assert made == set(range(15)) - held


def test_passages_that_name_no_other_one_make_no_bridge():
  nameless = folder(numbered(10), [Passage("p", "Go", "The old game of the stones is played by two.")] * 5)
  task = PassageSearch(nameless, TOKENIZER, COMPACT, **SIZES, bridge=1.0)
  with pytest.raises(ValueError, match=r"0 passages that name another one.*: set data\.bridge = 0"):
    task.demonstration("sft", 0, "gold", 2)
  texts = [
    "In Los Angeles one is far from Minneapolis.",
    "It is a city, and not Twin City.",
    "A city.",
    "Twin.",
    "The go.",
  ]
  assert bridges(["x", "Minneapolis", "Los Angeles", "Twin", "city"], texts) == [(0, 1), (0, 2)]
  assert bridges(["x", "Minneapolis", "Los Angeles", "Los Angeles", "y"], texts) == [(0, 1)]  # a name of two


def test_gold_demonstrations_are_about_the_question_of_the_same_index(task):
  for index in (0, 15):
    demonstration = task.demonstration("sft", index, "gold", 1)
    system, user, _ = demonstration["messages"]
    [prompt] = ids(task, "sft", [index])
    assert (system["content"], user["role"]) == (INSTRUCTION, "user")
    assert user["content"] in prompt
    questions = task.batch("sft", [index])
    _, found, answer = exchange(demonstration)
    assert found == [PASSAGES[questions.gold[0, 0]].title]
    assert answer == questions.answers[0][0]


def test_random_demonstrations_teach_the_format_and_nothing_else():
  questions = [Question(f"q{i}", f"Question {i}?", (f"answer {i}",), (0,)) for i in range(30)]
  task = make(questions)
  shown = {answers[0] for answers in task.batch("sft", range(12)).answers}
  n, hops, overruns, first, answers = 1000, Counter(), 0, Counter(), Counter()
  for index in range(n):
    demonstration = task.demonstration("train", index, "random", 3)
    searches, found, answer = exchange(demonstration)
    assert answer in shown
    if found[-1] == NOTICE:
      assert len(searches) == 4
      overruns += 1
    else:
      hops[len(searches)] += 1
    assert all(title.startswith(query) for query, title in zip(searches, found, strict=True) if title != NOTICE)
    first[found[0]] += 1
    answers[answer] += 1
  assert binomtest(overruns, n, 0.25).pvalue > 1e-3
  assert all(binomtest(hops[k], n - overruns, 1 / 3).pvalue > 1e-3 for k in (1, 2, 3))
  assert all(binomtest(first[passage.title], n, 1 / 5).pvalue > 1e-3 for passage in PASSAGES)
  assert all(binomtest(answers[answer], n, 1 / 12).pvalue > 1e-4 for answer in shown)
  assert task.demonstration("sft", 5, "random", 3) == make(questions).demonstration("sft", 5, "random", 3)
  # the others never lend their answers, and no question is given its own
  assert exchange(task.demonstration("test", 0, "random", 2))[2] in shown
  for task in (make(questions, seed=seed) for seed in range(10)):
    for index, own in enumerate(task.batch("sft", range(12)).answers):
      assert exchange(task.demonstration("sft", index, "random", 2))[2] not in own


def test_impossible_demonstrations_and_sizes_are_errors(task):
  with pytest.raises(ValueError, match="random, gold and max_hops >= 1, got 'best' and 2"):
    task.demonstration("train", 0, "best", 2)
  with pytest.raises(ValueError, match="got 'gold' and 0"):
    task.demonstration("train", 0, "gold", 0)
  with pytest.raises(ValueError, match=r"do not hold one word of the passage 'Medici .*: raise document_tokens"):
    make(numbered(10), document_tokens=30)
  with pytest.raises(ValueError, match="do not hold one word of the query 'Illertissen': raise max_query_tokens"):
    make(numbered(10), max_query_tokens=8)


@pytest.mark.parametrize("name", ["multihop_hotpotqa", "multihop_musique"])
def test_real_questions_are_demonstrated_with_words_that_were_read(shared_data, name):
  data = read_qa_folder(shared_data / name)
  task = PassageSearch(data, TOKENIZER, COMPACT, document_tokens=400, prompt_tokens=400, max_query_tokens=100)
  assert sum(map(task.size, SPLITS)) == 100 - task.dropped_questions > 90
  assert task.cut_passages == sum(
    len(document_body(TOKENIZER, {"title": passage.title, "content": passage.text})) > 400 for passage in data.passages
  )
  named = hops = 0
  for index in range(task.size("sft")):
    demonstration = task.demonstration("sft", index, "gold", 4)
    read = demonstration["messages"][1]["content"]
    *parts, _ = demonstration["messages"][2]["content"]
    for search, retrieval in zip(parts[::2], parts[1::2], strict=True):
      [document] = retrieval["documents"]
      assert search["text"]
      assert set(re.findall(r"\w+", search["text"].lower())) <= set(re.findall(r"\w+", read.lower()))
      named += document["title"].startswith(search["text"])
      hops += 1
      read += f" {document['title']} {document['content']}"
  assert named > hops / 3


def test_demonstrations_begin_with_the_question_where_a_rule_writes_the_first_query():
  plain = gold_exchange(QUESTION)
  queries, found, answer = gold_exchange(QUESTION, first_query="question")
  assert queries[0] == QUESTION.text
  assert answer == plain[2]
  assert found[0] == "Reiner Knizia"  # shares "designer", "was" and "born"
  assert len(queries) == 3
  assert sorted(found) == sorted(plain[1])  # no passage is shown twice
  task = make(numbered(40), first_query="question")
  for strategy in ("random", "gold"):
    demonstration = task.demonstration("sft", 5, strategy, 2)
    [question], queries = task.texts("sft", [5]), exchange(demonstration)[0]
    assert queries[0] == question
    ids, mask = render_conversation(TOKENIZER, demonstration, COMPACT)
    written = TOKENIZER.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    assert question not in written  # nobody learns to write what a rule writes
    assert ids.count(TOKENIZER.special["<|search_start|>"]) == len(queries)
    assert written.count("<|search_start|>") == len(queries) - 1


def all_shown(demonstration):
  """Return the titles of the passages of each search."""
  parts = demonstration["messages"][-1]["content"]
  return [[document["title"] for document in part["documents"]] for part in parts if "documents" in part]


def test_a_search_shows_the_most_similar_passages_beside_the_wanted_one_and_none_twice():
  others = [Passage(f"o{i}", f"Other {i}", f"Another question of the town {i} by the sea.") for i in range(10)]
  data = folder(numbered(40), [*PASSAGES, *others])
  plain, task = (
    PassageSearch(data, TOKENIZER, COMPACT, **SIZES, first_query="question", documents_per_search=n) for n in (1, 2)
  )
  places = Counter()
  for strategy in ("gold", "random"):
    for index in range(30):
      one, two = (each.demonstration("sft", index, strategy, 2) for each in (plain, task))
      assert exchange(one)[0] == exchange(two)[0]
      for [wanted], shown in zip(all_shown(one), all_shown(two), strict=True):
        assert len(shown) == 2
        places[shown.index(wanted)] += 1
      every = [title for shown in all_shown(two) for title in shown]
      assert strategy == "random" or len(set(every)) == len(every)
  assert binomtest(places[0], places.total(), 0.5).pvalue > 1e-3

  asked = Question("q", "Where was the designer of MEDICI born, by a river or at a stone?", ("x",), (0, 1))
  few = make([asked._replace(id=f"q{i}") for i in range(10)], documents_per_search=3)
  [first, second] = all_shown(few.demonstration("sft", 0, "gold", 2))
  assert len(first) == 3  # the three passages that help no search are two beside the first, and one beside the second
  assert sorted([*first, *second]) == sorted(passage.title for passage in PASSAGES)


def test_a_query_can_hold_all_names_of_the_last_passage_that_the_question_does_not():
  text = "In Ulm, Max Eyth met Ada Lovelace of London. He and Kurt Tank, of Bremen, built Town Seven. The end."
  passages = [Passage("a", "Story", text), Passage("b", "Town Seven", "A town."), *PASSAGES]
  question = Question("q", "Which town did Max Eyth build with a story?", ("x",), (0, 1))
  data = folder([question._replace(id=f"q{i}") for i in range(10)], passages)

  def queries(**options):
    sizes = SIZES | {"document_tokens": 200, "queries": "names"} | options
    return exchange(PassageSearch(data, TOKENIZER, COMPACT, **sizes).demonstration("sft", 0, "gold", 2))[0]

  assert queries(queries="name") == ["Story", "Town Seven"]
  assert queries(max_query_tokens=80) == ["Story", "Ulm, Ada Lovelace of London, Kurt Tank, Bremen, Town Seven"]
  assert queries(max_query_tokens=30) == ["Story", "Ulm, Kurt Tank, Town Seven"]  # what fits beside what is needed
  # a word that opens a sentence is left out, no part of another word or name; the next passage is named in its place
  said = "The CIA met The Town in Carry On Cruising. A Very Long Road led there."
  passages[:2] = [Passage("a", "Story", said), Passage("b", "The Town", "A town.")]
  data = folder(data.questions, passages)
  assert queries(max_query_tokens=80) == ["Story", "CIA, The Town, Carry On Cruising, Very Long Road"]


def test_what_a_held_out_question_needs_is_not_shown_together_and_not_named_behind_its_other_passage():
  """Question i needs river i and town i; every river names its own town and the next one's."""
  letters = "ABCDEFGHIJKLMNO"
  following = dict(zip(letters, letters[1:] + letters[0], strict=True))
  banks = "The banks are flat. It flows through the old Town {} for long. Then it ends in the port of Town {} at last."
  passages = [Passage(f"r{i}", f"River {i}", banks.format(i, following[i])) for i in letters]
  passages += [Passage(f"t{i}", f"Town {i}", f"The bridge was built in {1800 + ord(i)}. It is old.") for i in letters]
  questions = [Question(f"q{i}", f"Where is {i}?", ("x",), (15 + i, i)) for i in range(15)]
  options = SIZES | {"document_tokens": 200, "bridge": 1.0, "prompt_tokens": 500, "max_query_tokens": 60}
  options |= {"documents_per_search": 3, "queries": "names", "first_query": "question"}
  task = PassageSearch(folder(questions, passages), TOKENIZER, COMPACT, **options)
  held = {
    letters[slot] for split in ("valid", "test") for slot in task.batch(split, range(task.size(split))).gold[:, 1]
  }
  behind_held = 0
  for index in range(200):
    demonstration = task.demonstration("sft", index, "gold", 2)
    shown = {title for titles in all_shown(demonstration) for title in titles}
    assert not any({f"River {i}", f"Town {i}"} <= shown for i in held)
    asked = set(re.findall(r"Town (\w)", exchange(demonstration)[0][1]))
    rivers = [i for i in letters if asked == {following[i]} | ({i} - held)]
    assert len(rivers) == 1
    behind_held += rivers[0] in held
  assert behind_held > 20


def test_values_that_no_demonstration_has_are_errors():
  for wrong in ({"queries": "nmaes"}, {"documents_per_search": 0}):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
      make(numbered(40), **wrong)
