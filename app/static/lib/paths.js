// Lines of charts.

/** The path of a line through `values`, with a gap where one is null. `x` is a function of the index, `y` of the value. A
 * line that is stepped stays at a value until the next. */
export function pathOf(values, x, y, isStepped = false) {
  let [path, pen] = ["", "M"];
  values.forEach((value, at) => {
    if (value === null) return void (pen = "M");
    const [across, down] = [x(at).toFixed(1), y(value).toFixed(1)];
    path += isStepped && pen === "L" ? `H${across}V${down}` : `${pen}${across} ${down}`;
    pen = "L";
  });
  return path;
}
