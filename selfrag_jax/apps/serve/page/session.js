// What this tab remembers until it is closed: the conversation, the settings, the API key.

const PREFIX = "selfrag_jax.";

// A browser that keeps nothing for sites throws when it is asked; then the page's own variables must do.
function openStorage() {
  try {
    sessionStorage.setItem(PREFIX + "probe", "");
    sessionStorage.removeItem(PREFIX + "probe");
    return sessionStorage;
  } catch (error) {
    console.warn("nothing is kept for a reload:", error.message);
    const values = new Map();
    return { getItem: (key) => values.get(key) ?? null, setItem: (key, value) => values.set(key, value) };
  }
}

const storage = openStorage();

// The value of a name; `otherwise` where there is none, or one that cannot be read.
export function load(name, otherwise) {
  const text = storage.getItem(PREFIX + name);
  if (text === null) return otherwise;
  try {
    return JSON.parse(text);
  } catch (error) {
    console.warn(`${name} is not readable and starts anew:`, error.message);
    return otherwise;
  }
}

// Whether the value could be kept: a tab has room for about five million characters.
export function save(name, value) {
  try {
    storage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch (error) {
    console.warn(`${name} is not kept for a reload:`, error.message);
    return false;
  }
}
