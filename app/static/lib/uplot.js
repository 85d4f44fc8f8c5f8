// uPlot has no small build that is a module: a script of the page makes it global.
export const uPlot = globalThis.uPlot;
