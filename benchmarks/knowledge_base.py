"""The build of a knowledge base of 100,000 short documents, undisturbed and killed at random moments.

  python benchmarks/knowledge_base.py [--documents=100000] [--kills=10] [--model=token-bag]

Prints the time and the peak memory of the undisturbed build; then, for each kill, its time and whether the resumed
build published the same files, to the byte. Exit code 1 if a build published other files.
"""

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DOCUMENTS = flags.DEFINE_integer("documents", 100_000, "Documents of 20 to 60 words.")
KILLS = flags.DEFINE_integer("kills", 10, "Builds that are killed.")
MODEL = flags.DEFINE_string("model", "token-bag", "Encoder.")


def write_documents(path: Path, n: int) -> None:
  """Write documents of made-up words, whose frequencies fall like those of a language."""
  rng = random.Random(0)
  syllables = [a + b for a in "bcdfglmnprst" for b in "aeiou"]
  words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(20_000)]
  weights = [1 / (rank + 10) for rank in range(len(words))]
  with path.open("w") as file:
    for i in range(n):
      text = " ".join(rng.choices(words, weights, k=rng.randint(20, 60)))
      file.write(json.dumps({"id": str(i), "title": words[i % len(words)], "text": text}) + "\n")


def start(documents: Path, output: Path) -> subprocess.Popen:
  """Start a build in a process of its own."""
  command = [sys.executable, "-m", "selfrag_jax.retrieval", "build", "--documents", str(documents)]
  command += ["--output", str(output), "--type", "dense", "--model", MODEL.value, "--quiet"]
  return subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.DEVNULL)


def published(output: Path) -> dict[str, str]:
  """Return the digests of the files that a build published."""
  manifest = json.loads((output / "manifest.json").read_text())
  return {name: digest["sha256"] for name, digest in manifest["files"].items()}


def main(_: list[str]) -> None:
  """Build, kill, resume, compare."""
  with tempfile.TemporaryDirectory() as folder:
    documents = Path(folder) / "documents.jsonl"
    write_documents(documents, DOCUMENTS.value)
    whole = Path(folder) / "whole"
    began = time.monotonic()
    if start(documents, whole).wait():
      sys.exit("the build failed")
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{DOCUMENTS.value:,} documents, {MODEL.value}: {seconds:.1f} s, {peak:.2f} GB at most", flush=True)
    wanted, rng, same = published(whole), random.Random(0), 0
    for number in range(KILLS.value):
      output, after = Path(folder) / f"killed{number}", rng.uniform(0.05, 0.98) * seconds
      killed = start(documents, output)
      try:
        killed.wait(after)
        moment = "had ended"
      except subprocess.TimeoutExpired:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        blocks = len(list((output / ".build").glob("*.npy"))) if (output / ".build").is_dir() else 0
        moment = f"{blocks} blocks kept"
      began = time.monotonic()
      # a build that was killed after it had published has left a knowledge base
      failed = not (output / "manifest.json").exists() and start(documents, output).wait()
      equal = not failed and published(output) == wanted
      same += equal
      verdict = "the same files" if equal else "OTHER FILES"
      print(
        f"killed after {after:5.1f} s ({moment}), resumed in {time.monotonic() - began:5.1f} s: {verdict}", flush=True
      )
      shutil.rmtree(output)
    print(f"{same} of {KILLS.value} the same")
    sys.exit(same != KILLS.value)


if __name__ == "__main__":
  app.run(main)
