// What a browser may refuse: the tab's memory (blocked in a cross-site frame) and the address (only so many changes at a time). Both may fail
// without anything else failing, and it is here that they do.

const ADDRESS_MS = 300; // Safari throws after 100 changes in 30 seconds; a held arrow key makes that many in four

/**
 * A small memory of texts by key: `get(key)` (null where there is none), `set(key, text)` and `drop(key)`. It is the browser's own, `find()` gives
 * it (such as () => sessionStorage), or, where the browser refuses that or is full, one that lasts as long as the page.
 */
export function createMemo(find) {
  const own = new Map();
  const attempt = (action) => {
    try {
      return action(find());
    } catch {
      return null; // SecurityError, QuotaExceededError, or no such object at all
    }
  };
  return {
    get: (key) => attempt((kept) => kept.getItem(key)) ?? own.get(key) ?? null,
    set(key, text) {
      own.set(key, text);
      attempt((kept) => kept.setItem(key, text));
    },
    drop(key) {
      own.delete(key);
      attempt((kept) => kept.removeItem(key));
    },
  };
}

/**
 * A function that brings the address to what `wanted()` gives, once it has not been called for a moment. `replace(url)` changes it and may throw:
 * the address then stays behind until the next call.
 */
export function createFollower(wanted, replace, wait = ADDRESS_MS) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      try {
        replace(wanted());
      } catch {
        // An address that lags behind costs nobody anything.
      }
    }, wait);
  };
}
