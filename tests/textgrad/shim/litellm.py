"""A scripted replacement of LiteLLM's `completion`: it mends programs and criticises every other prompt."""

MENDED = """
import bisect

def longest_increasing_subsequence(nums):
    tails = []
    for n in nums:
        place = bisect.bisect_left(tails, n)
        tails[place:place + 1] = [n]
    return len(tails)
"""


def completion(model, messages, **options):
  """Answer a prompt of an optimizer with a new version, any other with a critique."""
  asked = messages[-1]["content"]
  asked = asked if isinstance(asked, str) else "".join(part.get("text", "") for part in asked)
  version = MENDED if "def longest" in asked else "A better text.\nAnswer: 3"
  is_update = "<IMPROVED_VARIABLE>" in asked
  text = f"<IMPROVED_VARIABLE>{version}</IMPROVED_VARIABLE>" if is_update else "Not yet.\nAnswer: 2"
  return {"choices": [{"message": {"content": text}}]}
