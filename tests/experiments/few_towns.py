"""A folder of a few questions about towns, and a pretrained policy for them of which every token is known.

The policy is a Llama whose next token follows from its last one: it searches for `Velden` as often as it may, then
answers `Mulder`, or `Rhine` at times when it samples.
"""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from configs.refrag import get_config
from selfrag_jax.tasks.passages import INSTRUCTION
from selfrag_jax.text.tokenizer import BPETokenizer

# a person, the town of birth, its mayor, its river
TOWNS = [
  ("Ada", "Velden", "Smit", "Rhine"),
  ("Bruno", "Arcen", "Jansen", "Meuse"),
  ("Clara", "Doorn", "Bakker", "Rhine"),
  ("Dirk", "Elst", "Visser", "Rhine"),
  ("Emma", "Goor", "Mulder", "Meuse"),
  ("Fred", "Heino", "Dekker", "Rhine"),
]
PASSAGES = {person: f"{person} was born in {town}." for person, town, _, _ in TOWNS}
PASSAGES |= {town: f"{town} is governed by {mayor} beside the {river}." for _, town, mayor, river in TOWNS}
SLOTS = {title: slot for slot, title in enumerate(PASSAGES)}
# question, answer, gold passages: the first six name their second passage only, the others both
QUESTIONS = [(f"Which stream passes the birthplace of {who}?", river, [who, town]) for who, town, _, river in TOWNS]
QUESTIONS += [(f"Who rules {town}, where {who} was born?", mayor, [town, who]) for who, town, mayor, _ in TOWNS]
TOO_LONG = ("Which stream, " + "if there is one, " * 20 + "passes Velden?", "Rhine", ["Velden"])

FOLLOWS = {
  "<|search_start|>": {"Velden": 10},
  "Velden": {"<|search_end|>": 10},
  "<|answer_start|>": {"Mulder": 10, "Rhine": 9.75},
  "Mulder": {"<|answer_end|>": 10},
  "Rhine": {"<|answer_end|>": 10},
}


def write_questions(folder):
  """Write the files of HotpotQA."""
  records, qrels = [], ["query-id\tcorpus-id\tscore"]
  for number, (question, answer, gold) in enumerate([*QUESTIONS, TOO_LONG]):
    facts = [[title, 0] for title in gold]
    records.append({"_id": f"q{number}", "question": question, "answer": answer, "supporting_facts": facts})
    qrels += [f"q{number}\t{title}\t1" for title in gold]
  corpus = [json.dumps({"_id": title, "title": title, "text": text}) for title, text in PASSAGES.items()]
  (folder / "corpus.jsonl").write_text("\n".join(corpus))
  (folder / "questions.json").write_text(json.dumps(records))
  (folder / "qrels.tsv").write_text("\n".join(qrels))


def write_llama(folder):
  """Write a byte-level BPE with the tokens of ChatML, and a Llama that follows `FOLLOWS` and else opens a search."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet, control = pre_tokenizers.ByteLevel.alphabet(), ["<|im_start|>", "<|im_end|>"]
  trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=control, initial_alphabet=alphabet, show_progress=False)
  questions = [question for question, _, _ in QUESTIONS]
  tokenizer.train_from_iterator(9 * [INSTRUCTION, *PASSAGES.values(), *questions, "Velden", "Mulder", "Rhine"], trainer)
  tokenizer.save(str(folder / "tokenizer.json"))
  ours = BPETokenizer.from_folder(folder)

  def id_of(token):
    [only] = [ours.special[token]] if token in ours.special else ours.encode(token)
    return only

  torch.manual_seed(0)
  sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
  model = LlamaForCausalLM(LlamaConfig(vocab_size=ours.vocab_size, **sizes))
  embed, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
  embed[:, 0] += 1
  head[id_of("<|search_start|>"), 0] += 4
  for dimension, (token, following) in enumerate(FOLLOWS.items(), 1):
    embed[id_of(token), dimension] += 1
    for next_token, weight in following.items():
      head[id_of(next_token), dimension] += weight
  model.save_pretrained(folder)


def small_config(make_folder):
  """Return the config of a run that takes seconds; `make_folder(name)` makes the folders of questions and policy."""
  questions, llama = make_folder("questions"), make_folder("llama")
  write_questions(questions)
  write_llama(llama)
  config = get_config("smollm2_135m")
  config.init, config.data.path = str(llama), str(questions)
  config.data.update({"document_tokens": 32, "prompt_tokens": 64})
  config.memory.d_embed = 64
  config.rollout.update({"max_hops": 2, "documents_per_hop": 2, "max_query_tokens": 3, "max_answer_tokens": 3})
  config.rollout.distinct = False  # this policy asks for the same again and again
  config.sft.update({"steps": 2, "max_tokens": 256, "accumulate": 1})
  config.rl.update({"steps": 1, "questions_per_step": 8, "rollouts_per_question": 2, "accumulate": 1})
  config.evaluation.update({"periodic": 1, "final": 3, "batch_size": 8})
  return config.to_dict()
