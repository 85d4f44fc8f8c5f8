// The state of what a button does: under way, or failed where it stands.
import { useState } from "preact/hooks";

/** `act(run)` runs `run()` and answers `{done, value}`; `busy` is true meanwhile, and `error` what it threw. */
export function useAction() {
  const [{ busy, error }, tell] = useState({ busy: false, error: null });
  const act = async (run) => {
    tell({ busy: true, error: null });
    try {
      const value = await run();
      tell({ busy: false, error: null });
      return { done: true, value };
    } catch (error) {
      tell({ busy: false, error: error.name === "AbortError" ? null : error });
      return { done: false };
    }
  };
  return { busy, error, act };
}
