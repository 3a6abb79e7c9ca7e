"""An HTTP server that speaks OpenAI's protocol, with answers from knowledge bases and a memory; needs `.[serve]`."""
