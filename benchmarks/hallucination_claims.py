"""Claims about passages whose truth is known, made by rules from the sentences of the passages.

A claim starts as a sentence of a passage: copied, or, every second one, paraphrased by a rule, if one applies. A
supported claim is left like that, and some hold negations. An unsupported claim is made from another sentence in the
same way, and is then spoilt. *Negated*: a negation is taken out, or one is put in that the passage has elsewhere.
*Swapped*: another name or number of the passage takes the place of one, or two of the claim change places. *Shuffled*:
the words come in a random order. So all claims share their words with the passage to about the same degree.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

KINDS = ("supported", "negated", "swapped", "shuffled")

Rule = Callable[[str], str | None]
Spoil = Callable[[str, str, random.Random], str | None]  # of a claim and its passage


class Claim(NamedTuple):
  """A claim, the passage that it is about, the number of the passage, and one of KINDS."""

  text: str
  passage: str
  number: int
  kind: str
  base: str  # the name of the rule of a paraphrase, or "copy"


SENTENCE_END = re.compile(r"(?<=[a-z0-9)]\.)\s+(?=[A-Z])")
HAS_NEGATION = re.compile(r"\b(not|never|no|cannot|without|neither|unable)\b|n't\b")
# (pattern, replacement) pairs that take a negation out
WITHOUT_NEGATION = [
  (r"\bneither (.*?) nor\b", r"both \1 and"),
  (r"\b(can)not\b", r"\1"),
  (r"\b(do|does|did|is|was|were|are|had|has|could|would)n't\b", r"\1"),
  (r" (not|never|no longer)\b", ""),
  (r"\bwithout\b", "with"),
  (r"\bunable\b", "able"),
  (r"\b(is|was|were|are|had|has|have|of|with|there) no\b", r"\1 some"),
]
NOT_A_DENIAL = re.compile(r"\b(not (only|just|merely|until|necessarily)|whether or not|no (more|less|later))\b|if not")
AUXILIARY = re.compile(
  r" (is|was|were|are|has|had|have|can|could|will|would|may|might|must|should)\b(?! (not|never|no)\b)"
)

SYNONYMS = dict(
  re.findall(
    r"(\w+):(\w+)",
    "large:big big:large began:started started:began many:numerous numerous:many built:constructed constructed:built"
    " used:employed important:significant significant:important several:various various:several main:principal"
    " led:headed because:since helped:assisted gave:granted received:obtained obtained:received allowed:permitted"
    " however:nevertheless although:though though:although about:roughly approximately:about often:frequently"
    " frequently:often primarily:mainly mainly:primarily usually:generally generally:usually occurred:happened"
    " region:area area:region country:nation nation:country city:town town:city located:situated powerful:strong"
    " strong:powerful difficult:hard new:recent old:ancient near:beside during:throughout within:inside believe:think"
    " believed:thought argued:maintained claimed:asserted said:stated showed:demonstrated shows:demonstrates"
    " required:needed requires:needs created:produced produced:created developed:devised established:founded"
    " founded:established entire:whole whole:entire increase:rise increased:rose decline:fall reduced:lowered"
    " opposed:resisted fought:battled defeated:beat captured:seized attacked:assaulted ordered:commanded"
    " people:persons also:too considered:regarded known:recognized called:termed problem:difficulty"
    " example:instance method:technique methods:techniques number:quantity rapid:fast rapidly:quickly quickly:rapidly",
  )
)
MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
DATE = rf"(?:{MONTH} (?:\d{{1,2}}, )?)?\d{{4}}"
NAME = r"[A-Z][\w’'-]+(?: (?:of |the |de |von )?[A-Z][\w’'-]+)*"


def lower_first(text: str) -> str:
  """Begin with a small letter, unless the first word seems to be a name."""
  first = text.split(maxsplit=1)[0]
  common = ("The", "A", "An", "It", "He", "She", "They", "This", "These", "In", "There", "His", "Its", "Their", "Many")
  return text[0].lower() + text[1:] if first in common else text


def upper_first(text: str) -> str:
  """Begin with a capital letter."""
  return text[:1].upper() + text[1:]


def front_date(sentence: str) -> str | None:
  """Move a date at the end to the front."""
  match = re.fullmatch(rf"([^,]{{25,}}) ((?:in|on|by|since|until) {DATE})\.", sentence)
  return match and f"{upper_first(match[2])}, {lower_first(match[1])}."


def end_date(sentence: str) -> str | None:
  """Move a time or place at the front to the end."""
  match = re.fullmatch(r"((?:In|On|By|During|After|Since|At|Under|For) [^,]{3,40}), ([^,]{25,})\.", sentence)
  return match and f"{upper_first(match[2])} {match[1][0].lower()}{match[1][1:]}."


def front_clause(sentence: str) -> str | None:
  """Move a subordinate clause at the end to the front."""
  match = re.fullmatch(
    r"([^,]{25,}),? ((?:because|although|while|when|after|before|since|as|if|so that) [^,]{15,})\.", sentence
  )
  return match and f"{upper_first(match[2])}, {lower_first(match[1])}."


def end_clause(sentence: str) -> str | None:
  """Move a subordinate clause at the front to the end."""
  match = re.fullmatch(
    r"((?:Because|Although|While|When|After|Before|Since|As(?! such)|If) [^,]{12,}), (.{20,})\.", sentence
  )
  return match and f"{upper_first(match[2])}, {lower_first(match[1][0].lower() + match[1][1:])}."


def drop_aside(sentence: str) -> str | None:
  """Drop an apposition, a relative clause between commas, or a parenthesis."""
  shorter = re.sub(
    r"\s?\([^()]*\)|, (?:a|an|the|which|who|or|also|including|such as) [^,]{4,70},(?= \w)", "", sentence, count=1
  )
  return shorter if shorter != sentence and len(shorter) > 40 else None


def cleft(sentence: str) -> str | None:
  """Stress the subject: "It was X that"."""
  subject = rf"(?!(?:It|They|He|She|There|This|These|We) )({NAME}|The (?:[a-z]+ )?[a-z]+)"
  match = re.fullmatch(rf"{subject} (was|had|were|are|is|has|\w+ed) (.{{15,}})\.", sentence)
  verb = match and ("is" if match[2] in ("are", "is", "has") else "was")
  return match and f"It {verb} {lower_first(match[1])} that {match[2]} {match[3]}."


def passive(sentence: str) -> str | None:
  """Turn "X built Y" into "Y was built by X"."""
  match = re.fullmatch(rf"({NAME}|The [a-z]+) (\w+ed) ((?:the|a|an|his|their) [^,]{{4,60}}|{NAME})\.", sentence)
  return match and f"{upper_first(match[3])} was {match[2]} by {lower_first(match[1])}."


def active(sentence: str) -> str | None:
  """Turn "Y was built by X" into "X built Y"."""
  match = re.fullmatch(r"([^,]{3,60}) (?:was|were) (\w+ed) by ((?:the |a )?[^,]{3,60})\.", sentence)
  return match and f"{upper_first(match[3])} {match[2]} {lower_first(match[1])}."


def attribute(sentence: str) -> str | None:
  """Say it as somebody's words."""
  return f"According to the text, {lower_first(sentence)}"


def synonyms(sentence: str) -> str | None:
  """Replace up to three words by synonyms."""
  words, changed = sentence.split(" "), 0
  for i, word in enumerate(words):
    bare = word.rstrip(",.;")
    if bare in SYNONYMS and changed < 3:
      words[i], changed = SYNONYMS[bare] + word[len(bare) :], changed + 1
  return " ".join(words) if changed else None


PARAPHRASES: tuple[Rule, ...] = (
  front_date, end_date, front_clause, end_clause, drop_aside, cleft, passive, active, attribute, synonyms,
)  # fmt: skip


def paraphrase(sentence: str, rng: random.Random) -> tuple[str, str]:
  """Apply one or two rules at random; return the result and their names, "copy" if none applies."""
  rules = rng.sample(PARAPHRASES, len(PARAPHRASES))
  rules.sort(key=lambda rule: rule is attribute)  # it always applies
  names, wanted = [], rng.choice((1, 2))
  for rule in rules:
    if len(names) < wanted and not (rule is attribute and names) and (changed := rule(sentence)):
      sentence, names = changed, [*names, rule.__name__]
  return sentence, "+".join(names) or "copy"


def deny_less(claim: str, passage: str, rng: random.Random) -> str | None:
  """Take a negation out."""
  changed = (re.sub(pattern, replacement, claim, count=1) for pattern, replacement in WITHOUT_NEGATION)
  return None if NOT_A_DENIAL.search(claim) else next((text for text in changed if text != claim), None)


def deny_more(claim: str, passage: str, rng: random.Random) -> str | None:
  """Put a negation in that the passage has."""
  words = [word for word in ("not", "never") if re.search(rf"\b{word}\b", passage)]
  auxiliaries = list(AUXILIARY.finditer(claim))
  if HAS_NEGATION.search(claim) or not words or not auxiliaries:
    return None
  place = rng.choice(auxiliaries).end()
  return f"{claim[:place]} {rng.choice(words)}{claim[place:]}"


def entities(text: str) -> list[str]:
  """Return the names and numbers of a text; a capital at the beginning of a sentence makes no name."""
  found = re.finditer(rf"(?<![.!?] )(?<!^)(?<![\w-]){NAME}|\b\d[\d,.]*\d\b|\b\d\b", text)
  names = (match[0].removesuffix("'s").removesuffix("’s") for match in found)
  return [name for name in dict.fromkeys(names) if name not in ("In", "The", "A", "At", "On", "It")]


def form(entity: str) -> str:
  """Return what kind of entity it is: only entities of one kind are swapped."""
  return "year" if re.fullmatch(r"1\d{3}|20\d\d", entity) else "number" if entity[0].isdigit() else "name"


def swap(claim: str, passage: str, rng: random.Random) -> str | None:
  """Put another entity of the passage in the place of one, or let two entities of the claim change places."""
  here = [each for each in entities(claim) if each in entities(passage)]
  pairs = []
  for i, one in enumerate(here):
    for other in here[i + 1 :]:
      between = claim[claim.find(one) + len(one) : claim.find(other)]
      if form(one) == form(other) and apart(one, other) and len(set(between.split()) - {"and", "or", ",", "&"}) > 1:
        pairs.append((one, other))
  others = [
    (one, other)
    for one in here
    for other in entities(passage)
    if form(one) == form(other) and other not in claim and apart(one, other)
  ]
  if not pairs and not others:
    return None
  if pairs and (not others or rng.random() < 0.5):
    one, other = rng.choice(pairs)
    return claim.replace(one, "\0", 1).replace(other, one, 1).replace("\0", other, 1)
  one, other = rng.choice(others)
  return claim.replace(one, other, 1)


def apart(one: str, other: str) -> bool:
  """Tell whether two entities have no word in common, which might make them names of the same thing."""
  return not set(one.lower().split()) & set(other.lower().split())


def shuffle(claim: str, passage: str, rng: random.Random) -> str:
  """Put the words of a claim into a random order."""
  words = lower_first(claim.removesuffix(".")).split()
  rng.shuffle(words)
  return upper_first(" ".join(words)) + "."


def sentences(passage: str) -> list[str]:
  """Return the plain sentences of 8 to 40 words."""
  plain = lambda text: text.endswith(".") and not re.search(r"[\[\]\"“”:;?!]", text)
  return [text for text in SENTENCE_END.split(passage) if plain(text) and 8 <= len(text.split()) <= 40]


def keep(claim: str, passage: str, rng: random.Random) -> str:
  """Leave a claim as it is."""
  return claim


def make_claims(passages: Sequence[str], most: int, seed: int) -> list[Claim]:
  """Make claims, at most `most` of a kind.

  The sentences with a negation are rare: each gives up to one claim of each kind, for at most half of the claims; the
  negated one loses its negation. Half as many claims get one, from sentences without. A sentence without a negation
  gives one claim. So a negation says little about the kind of a claim.
  """
  rng = random.Random(seed)
  pool = [(number, sentence) for number, passage in enumerate(passages) for sentence in sentences(passage)]
  rng.shuffle(pool)
  denied = [entry for entry in pool if HAS_NEGATION.search(entry[1])]
  others = [entry for entry in pool if not HAS_NEGATION.search(entry[1])]
  claims: list[Claim] = []

  def add(kind: str, spoil: Spoil, entries: list[tuple[int, str]], most: int) -> int:
    """Spoil sentences until there are enough claims, drop those that were used from the entries, and count them."""
    used = []
    for entry in entries:
      number, sentence = entry
      base, rule = paraphrase(sentence, rng) if rng.random() < 0.5 else (sentence, "copy")
      if len(used) < most and (text := spoil(base, passages[number], rng)):
        claims.append(Claim(text, passages[number], number, kind, rule))
        used.append(entry)
    entries[:] = [entry for entry in entries if entry not in used]
    return len(used)

  add("negated", deny_more, others, add("negated", deny_less, list(denied), most // 2) // 2)
  for kind, spoil in (("supported", keep), ("swapped", swap), ("shuffled", shuffle)):
    add(kind, spoil, others, most - add(kind, spoil, list(denied), most // 2))
  return claims
