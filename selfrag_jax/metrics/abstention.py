"""A recogniser of English sentences which say that there is no answer, by rules."""

import re

_WHO = r"(?:i|we)\s+(?:really\s+|currently\s+)?"
_CANNOT = r"(?:do not|don't|cannot|can't|can not|could not|couldn't|am unable to|am not able to|was unable to|am not)"
_HAVE = r"have (?:any |enough |the |that |access |sufficient )*info\w*"
_SAY = rf"(?:know|answer|find|tell|determine|say|sure|provide|{_HAVE})"
_TEXTS = r"(?:documents?|passages?|texts?|contexts?|notes?|sources?|articles?|information)"
_GIVE = (
  r"(?:mention|say|contain|provide|specif|state|answer|include|give|tell|address|discuss|have (?:any|enough)|enough)"
)
_RULES = (
  rf"{_WHO}{_CANNOT}\s+(?:\w+\s+)?{_SAY}\b",
  rf"(?:the|these|this|any of the|provided|given)\s+(?:\w+\s+){{0,2}}{_TEXTS}\s+(?:\w+\s+){{0,2}}"
  rf"(?:do not|does not|don't|doesn't|is not|are not|isn't)\s+(?:\w+\s+)?{_GIVE}",
  rf"(?:none|neither) of the\s+(?:\w+\s+){{0,2}}{_TEXTS}\b",
  rf"no\s+(?:\w+\s+)?{_TEXTS}\s+(?:{_GIVE}|is|was|are)",
  rf"there\s+(?:is|are)\s+(?:no|not enough)\s+(?:\w+\s+)?(?:{_TEXTS}|mention|answer|evidence)\b",
  rf"[^.]{{0,80}}\b(?:is|are|was|were)\s+not\s+(?:\w+\s+)?(?:mentioned|stated|specified|provided|given|found|included)\s+"
  rf"(?:\w+\s+)?(?:in|by|within)\s+(?:the|these|this|any)\s+(?:\w+\s+){{0,2}}{_TEXTS}\b",
  r"(?:(?:it|that|the answer) is\s+)?(?:unknown|not (?:known|mentioned|stated|specified|provided|given))\W*$",
)
_OPENING = r"\W*(?:(?:i'm |i am )?(?:sorry|unfortunately|based on [^,]{0,60}|according to [^,]{0,60})\W+(?:but\s+)?)?"
_UNKNOWN = re.compile(f"{_OPENING}(?:{'|'.join(_RULES)})", re.IGNORECASE)


def says_unknown(sentence: str) -> bool:
  """Tell whether a sentence says that its author, or the documents before him, do not have the answer."""
  return _UNKNOWN.match(" ".join(sentence.replace("’", "'").split())) is not None
