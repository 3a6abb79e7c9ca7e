"""The adapter for lm-evaluation-harness, which evaluates our models on its tasks (`pip install -e '.[harness]'`).

  lm_eval.simple_evaluate(model=HarnessLM(load_model("smollm2-135m")), tasks=["arc_easy"])

All tokens of a text are ordinary ones, whatever it spells.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from selfrag_jax.generate.complete import complete
from selfrag_jax.generate.sampling import GREEDY, SamplingConfig
from selfrag_jax.model.likelihood import ending_log_probs
from selfrag_jax.model.lm import unstack
from selfrag_jax.model.pretrained import without_appended
from selfrag_jax.ragged import pad_rows, round_up
from selfrag_jax.text.chat import COMPACT, Special, find_template
from selfrag_jax.train.load import LoadedModel
from selfrag_jax.typing import Params, PRNGKey

STEP = 64  # lengths are rounded up to a multiple, so that a few compiled programs serve all requests
# names that pretrained models have for the beginning of a text, and for its end
FIRSTS = ("<s>", "<|begin_of_text|>", "<bos>")
ENDS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>")
CONTEXT = 2048  # tokens, for a model that has no limit of its own
Request = tuple[Any, list[int], list[int]]  # what was asked, and the ids of context and continuation
_complete = jax.jit(complete, static_argnames=("model", "max_new_tokens", "sampling", "stop_ids"))


class HarnessLM(TemplateLM):
  """A language model of ours as the harness asks it: for likelihoods and for continuations of plain text.

  Text that spells a control token stays text, so prompts in a chat template are not supported.
  """

  def __init__(
    self,
    loaded: LoadedModel,
    *,
    batch_size: int = 8,
    max_length: int = 0,
    max_new_tokens: int = 256,
    prefix_token: str = "",
    end_token: str = "",
  ):
    """Wrap a loaded model.

    Args:
      loaded: a result of `load_model`, with a tokenizer; ids that were appended to a pretrained vocabulary are never
        predicted.
      batch_size: rows at once.
      max_length: the most tokens of a context (0: the model's own limit, or 2,048); longer ones lose their beginning.
      max_new_tokens: the length of continuations where a task does not set it.
      prefix_token: the control token before a text without a context (empty: the first of a conversation, or else one
        of the usual names).
      end_token: the control token that ends a continuation (empty: the end of a turn, or else one of the usual names).

    Raises ValueError for a model without a tokenizer, and for one that does not know these tokens.
    """
    super().__init__()
    if loaded.tokenizer is None:
      raise ValueError("the model was loaded without a tokenizer; give it to load_model")
    self._tokens = loaded.tokenizer
    self._config, self._params = without_appended(loaded.config, loaded.params, loaded.base_vocab_size)
    self._unstacked: Params | None = None  # made for the first continuation
    template = find_template(loaded.tokenizer) or (COMPACT if loaded.base_vocab_size is None else None)
    marks = [part for part in (*template.bos, *template.user.prefix) if isinstance(part, Special)] if template else []
    ends = [template.end_of_turn.name] if template else [*ENDS]
    firsts = [marks[0].name] if marks else [*FIRSTS, *ENDS]
    self._end = self._known("end_token", [end_token] if end_token else ends)
    self._prefix = self._known("prefix_token", [prefix_token] if prefix_token else firsts)
    self.batch_size, self.max_length = batch_size, max_length or loaded.context_tokens or CONTEXT
    self._most_new = max_new_tokens

  def _known(self, option: str, names: Sequence[str]) -> int:
    """Return the id of the first name that the model knows: appended ids are cut from it."""
    unknown = self._config.vocab_size
    ids = [id for name in names if (id := self._tokens.special.get(name, unknown)) < unknown]
    if not ids:
      raise ValueError(f"the model knows no control token {' or '.join(names)}; name one: HarnessLM(..., {option}=...)")
    return ids[0]

  @property
  def eot_token_id(self) -> int:
    """The id that ends a continuation."""
    return self._end

  @property
  def prefix_token_id(self) -> int:
    """The id before a text without a context."""
    return self._prefix

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
    """Encode a text as ordinary ids, never control tokens."""
    return self._tokens.encode(string)

  def _loglikelihood_tokens(
    self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
  ) -> list[tuple[float, bool]]:
    answers: dict[int, tuple[float, bool]] = {}
    if (longest := max((len(continuation) for *_, continuation in requests), default=0)) > self.max_length:
      raise ValueError(f"a continuation has {longest} tokens, this model reads {self.max_length:,}; raise max_length")
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
    with tqdm(total=len(requests), desc="likelihoods", disable=disable_tqdm) as progress:
      for start in range(0, len(order), self.batch_size):
        part = order[start : start + self.batch_size]
        rows = [[*requests[i][1], *requests[i][2]][-self.max_length - 1 :] for i in part]
        scored = [len(requests[i][2]) for i in part]
        spare = self.batch_size - len(part)
        tokens, lengths = pad_rows(rows + [[]] * spare, round_up(len(rows[0]), STEP))
        counts, most = np.array(scored + [0] * spare, np.int32), round_up(max(scored), 8)
        sums, greedy = ending_log_probs(self._config, self._params, tokens, lengths, counts, most=most)
        for i, total, is_greedy in zip(part, np.asarray(sums), np.asarray(greedy), strict=False):
          answers[i] = float(total), bool(is_greedy)
          if (asked := requests[i][0]) is not None:
            self.cache_hook.add_partial("loglikelihood", asked, answers[i])
        progress.update(len(part))
    return [answers[i] for i in range(len(requests))]

  def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
    """Return the log-likelihood of whole texts; those longer than the context are cut into windows."""
    windows, owners = [], []
    for number, request in enumerate(requests):
      ids = self.tok_encode(request.args[0])
      for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
        windows.append((None, *make_disjoint_window(pair)))
        owners.append(number)
    scores = self._loglikelihood_tokens(windows, disable_tqdm)
    return np.bincount(owners, [score for score, _ in scores], len(requests)).tolist()

  def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
    """Continue texts until one of their stop sequences."""
    texts: dict[int, str] = {}
    settings = [repr(sorted(request.args[1].items())) for request in requests]
    order = sorted(range(len(requests)), key=lambda i: (settings[i], len(requests[i].args[0])))
    with tqdm(total=len(requests), desc="continuations", disable=disable_tqdm) as progress:
      for _, group in groupby(order, key=settings.__getitem__):
        alike = list(group)
        for start in range(0, len(alike), self.batch_size):
          part = alike[start : start + self.batch_size]
          key = jax.random.fold_in(jax.random.key(0), part[0])
          written = self._continue([requests[i].args[0] for i in part], requests[part[0]].args[1], key)
          texts |= zip(part, written, strict=True)
          for i in part:
            self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
          progress.update(len(part))
    return [texts[i] for i in range(len(requests))]

  def _continue(self, contexts: Sequence[str], settings: dict[str, Any], key: PRNGKey) -> list[str]:
    options: dict[str, Any] = dict(normalize_gen_kwargs(settings, self._most_new))
    most = options["max_gen_toks"]
    if most >= self.max_length:
      raise ValueError(f"max_gen_toks = {most} leaves no room for a text: this model reads {self.max_length:,} tokens")
    if self._unstacked is None:
      self._unstacked = jax.jit(unstack, static_argnums=0)(self._config, self._params)
    rows = [self.tok_encode(context)[-(self.max_length - most) :] or [self.prefix_token_id] for context in contexts]
    width = round_up(max(map(len, rows)), STEP)
    tokens, lengths = pad_rows(rows + [[]] * (self.batch_size - len(rows)), width)
    written = _complete(
      self._config,
      self._unstacked,
      tokens,
      lengths,
      key,
      max_new_tokens=most,
      sampling=_sampling(options),
      stop_ids=(self.eot_token_id,),
    )
    until = handle_stop_sequences(options.get("until"), eos=None)
    said = [row[:n] for row, n in zip(np.asarray(written.tokens), np.asarray(written.lengths), strict=True)]
    decode = lambda ids: self._tokens.decode([id for id in ids.tolist() if id != self.eot_token_id])
    return [postprocess_generated_text(decode(ids), until, None) for ids in said[: len(rows)]]


def _sampling(options: dict[str, Any]) -> SamplingConfig:
  if not options.get("do_sample"):
    return GREEDY
  top_k, top_p = options.get("top_k") or 0, options.get("top_p") or 1.0
  return SamplingConfig(options.get("temperature") or 1.0, int(top_k), float(top_p))
