"use strict";
/**
 * What the views of many ranks share.
 *
 *   page.ofRank(rank)             "rank 3"; those that the verdict names are marked
 *   page.rankCell(key)            the `cell` of a column with the number of a rank
 *   page.msColumn(key, title, more)   a column of milliseconds
 *   page.culpritColor()
 */
(function () {
  const MS = 1000; // in µs, which the tables format

  page.culpritColor = () => page.color.kind("culprit");
  page.isNamed = rank => page.data.named.includes(rank);

  page.msColumn = (key, title, more) => ({
    key, title, kind: "us", ...more,
    value: row => { const value = more && more.of ? more.of(row) : row[key]; return value === null || value === undefined ? value : value * MS; },
  });

  page.rankCell = key => (row, cell) => {
    const rank = row[key];
    if (rank === null || rank === undefined || !page.isNamed(rank)) return false;
    const text = page.text("strong", `${rank}`);
    text.style.color = page.culpritColor();
    text.title = "named by the verdict";
    page.add(cell, "▸ ", text);
    return true;
  };
})();
