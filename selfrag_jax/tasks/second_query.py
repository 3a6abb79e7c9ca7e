"""Questions that need several passages, as training data for an encoder of queries: what is still to be found."""

from selfrag_jax.retrieval.beir import Judged
from selfrag_jax.retrieval.multi_hop import add_passage


def with_read_passages(data: Judged) -> Judged:
  """Return each question, and again beside each of its passages: then only its other passages are relevant.

  The texts are those that `MultiHopRetriever(write_query="add_passage")` asks (multi-hop dense retrieval, arXiv
  2009.12756). Questions with one passage are asked without it alone.
  """
  documents = {document.id: document for document in data.documents}
  queries, qrels = {}, {}
  for id, question in data.queries.items():
    queries[id], qrels[id] = question, data.qrels[id]
    for read in data.qrels[id]:
      if others := {other: grade for other, grade in data.qrels[id].items() if other != read}:
        text = add_passage(question, [[documents[read]]])
        assert text is not None
        key = f"{id}\t{read}"  # no id has a tab: the file of judgements separates its columns by tabs
        queries[key], qrels[key] = text, others
  return data._replace(queries=queries, qrels=qrels)
