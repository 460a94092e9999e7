"""The style sheet of the report: light or dark as the reader's system is, and narrow screens."""

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark; --back: #fff; --fore: #1c2024; --soft: #5c6670; --line: #dde2e7;
  --shade: #f5f7f9; --warn: #fff4d6; --c0: #1f6fb2; --c1: #c8501e; --c2: #2a8554; --c3: #8a4fb0;
  --c4: #a8791a; --c5: #b03a5b; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --fore: #e6e9ec; --soft: #9aa5b0;
  --line: #333a41; --shade: #1d2226; --warn: #3a3116; --c0: #6cb2ee; --c1: #f0925f; --c2: #66c596;
  --c3: #c79be6; --c4: #dcb45c; --c5: #ec8aa6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--back); color: var(--fore);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
header { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; gap: 0 1rem; }
h1 { margin: 0; font-size: 1.6rem; } h2 { margin: 2.5rem 0 .75rem; font-size: 1.25rem; }
header p, figcaption, caption, dt, summary { color: var(--soft); font-size: .875rem; }
nav ul, .legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: 0; }
a { color: var(--c0); }
.notice { background: var(--warn); border-radius: .5rem; padding: .75rem 1rem; margin: 1rem 0; }
.notice h2 { margin: 0; font-size: 1rem; } .notice ul { margin: .25rem 0 0; padding-left: 1.25rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: .5rem 1.5rem; }
.facts dd { margin: 0; }
.figures { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); }
figure { margin: 0; padding: .75rem; border: 1px solid var(--line); border-radius: .5rem; }
figure svg, figure img { display: block; width: 100%; height: auto; margin-top: .5rem; }
.cut { overflow: hidden; } .open { overflow: visible; }
.samples img { border-radius: .25rem; max-width: 26rem; }
svg text { fill: var(--soft); font-size: 13px; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--line); } polyline { fill: none; stroke-width: 1.75; stroke-linejoin: round; }
.key { display: inline-block; width: 1rem; height: .2rem; margin-right: .35rem; vertical-align: middle; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
circle { fill: var(--back); }
.key.c0 { background: var(--c0); } .key.c1 { background: var(--c1); } .key.c2 { background: var(--c2); }
.key.c3 { background: var(--c3); } .key.c4 { background: var(--c4); } .key.c5 { background: var(--c5); }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
caption { text-align: left; padding: .25rem 0; }
th, td { padding: .3rem .75rem; text-align: right; border-bottom: 1px solid var(--line); }
tbody th, .group th { text-align: left; font-weight: normal; }
tbody th { position: sticky; left: 0; background: var(--back); max-width: 18rem; }
.group th { position: static; padding-top: 1rem; color: var(--soft); font-size: .875rem; max-width: none; }
tbody tr:hover > * { background: var(--shade); }
strong { font-weight: 700; }
details { margin: 1rem 0; } summary { cursor: pointer; }
"""
