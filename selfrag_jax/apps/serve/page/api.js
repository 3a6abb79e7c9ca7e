// Requests to the server that this page came from, and what it means when they fail.

import { load } from "./session.js";

// kind: "key" (none, or a wrong one), "busy" (wait), "away" (no connection), "broken" (it ended in an answer),
// "refused" (the request is at fault), "failed" (the server is)
export class RequestError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

const isAbort = (error) => error.name === "AbortError";

function failure(status, message, wait) {
  const because = message ? ` It says: ${message}` : "";
  if (status === 401) {
    return new RequestError(
      "key",
      load("key", "") ? "The server does not accept this key." : "This server asks for a key.",
    );
  }
  if (status === 429) {
    const seconds = Number(wait);
    const when = seconds > 0 ? `in ${seconds} second${seconds === 1 ? "" : "s"}` : "in a moment";
    return new RequestError("busy", `The server has too much to do. Wait, and try again ${when}.`);
  }
  if (status === 503) return new RequestError("busy", `The server is not ready. Try again in a moment.${because}`);
  if (status === 413) return new RequestError("refused", `That is more text than the server takes.${because}`);
  if (status >= 500) return new RequestError("failed", `The server could not do this (error ${status}).${because}`);
  return new RequestError("refused", message || `The server refused this request (error ${status}).`);
}

// The server's own words for an error: OpenAI's form, or FastAPI's.
function words(body) {
  const message = body?.error?.message ?? body?.detail?.message ?? body?.detail;
  return typeof message === "string" ? message : "";
}

async function errorOf(response) {
  const text = await response.text();
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // a proxy's page of markup has no words for a reader; the status must do
  }
  return failure(response.status, words(body), response.headers.get("Retry-After"));
}

// Send a request and return its response. Raises RequestError, or the browser's AbortError once `signal` has fired.
async function request(method, path, { body, signal } = {}) {
  const headers = {};
  const key = load("key", "");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const json = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, { method, headers, body: json, signal, cache: "no-store" });
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new RequestError("away", "The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function answerOf(method, path, options) {
  const response = await request(method, path, options);
  return response.status === 204 ? null : response.json();
}

// The events of a stream: the JSON behind each `data:`, up to [DONE].
async function* events(response) {
  const broken = () => new RequestError("broken", "The connection ended before the answer was complete.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        throw isAbort(error) ? error : broken();
      }
      if (piece.done) throw broken();
      const lines = (rest + piece.value).split(/\r\n|\n|\r/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new RequestError("failed", `The server ended this answer. It says: ${words(event)}`);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that has failed already says so once more
  }
}

const query = (fields) => `?${new URLSearchParams(fields)}`;
const memoryPath = (id) => `v1/memory/${encodeURIComponent(id)}`;

export const models = () => answerOf("GET", "v1/models");
export const knowledgeBases = () => answerOf("GET", "v1/knowledge_bases");
export const search = (body, signal) => answerOf("POST", "v1/search", { body, signal });
export const memories = (fields, signal) => answerOf("GET", `v1/memory${query(fields)}`, { signal });
export const remember = (text, source) => answerOf("POST", "v1/memory", { body: { text, source } });
export const change = (id, text) => answerOf("PUT", memoryPath(id), { body: { text } });
export const forget = (id) => answerOf("DELETE", memoryPath(id));

// The chunks of a chat completion as they come.
export async function* complete(body, signal) {
  yield* events(await request("POST", "v1/chat/completions", { body: { ...body, stream: true }, signal }));
}
