"""The style sheet of the page: light and dark, wide and narrow, nothing fetched from anywhere."""

from typing import Final

from samo.report.theme import DARK, LIGHT

__all__ = []

_RULES: Final = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 var(--font)}
main{max-width:908px;margin:0 auto;padding:56px 24px 96px}
header{margin-bottom:40px}
.eyebrow{margin:0 0 6px;color:var(--muted);font-size:13px;letter-spacing:.04em}
h1{margin:0 0 10px;font-size:36px;line-height:1.15;letter-spacing:-.02em;font-weight:680;overflow-wrap:anywhere}
h1,h2{text-wrap:balance}
h2{margin:0 0 6px;font-size:22px;line-height:1.3;letter-spacing:-.01em;font-weight:650;overflow-wrap:anywhere}
h3{margin:28px 0 8px;font-size:15px;font-weight:650;overflow-wrap:anywhere}
.summary{margin:0;color:var(--muted);font-size:17px;overflow-wrap:anywhere}
.warning{margin:18px 0 0;padding:10px 14px;border-left:3px solid var(--run1);background:var(--panel);font-size:14px;overflow-wrap:anywhere}
section{margin-top:64px}
.cards{display:grid;gap:16px;margin-top:0}
.card{padding:20px 24px 22px;background:var(--panel);border-radius:0 0 10px 10px;border-top:3px solid var(--colour);min-width:0}
.card .who{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;margin:0 0 12px}
.card .who b{color:var(--colour);font-size:16px;font-weight:650;overflow-wrap:anywhere}
.card .who span{color:var(--muted);font-size:13px}
.numbers{display:grid;grid-template-columns:repeat(4,minmax(0,1fr));gap:18px 24px;margin:0}
.numbers div{min-width:0}
.numbers dt{color:var(--muted);font-size:13px}
.numbers dd{margin:0}
.numbers .big{font-size:26px;line-height:1.25;font-weight:640;letter-spacing:-.015em;font-variant-numeric:tabular-nums;white-space:nowrap}
.numbers .small{color:var(--muted);font-size:13px;font-variant-numeric:tabular-nums}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin:10px 0 14px;padding:0;list-style:none;color:var(--muted);font-size:13px}
.key li{display:flex;align-items:center;gap:7px;min-width:0;overflow-wrap:anywhere}
.key i{flex:none;width:14px;height:10px;border-radius:2px;background:var(--colour)}
.key i.round{width:10px;border-radius:50%;background:none;border:2px solid var(--muted)}
.key i.dashed,.key i.dotted{width:20px;height:3px;border-radius:0;background:repeating-linear-gradient(90deg,var(--colour) 0 5px,transparent 5px 8px)}
.key i.dotted{background:repeating-linear-gradient(90deg,var(--colour) 0 2px,transparent 2px 5px)}
svg{display:block;width:100%;height:auto;overflow:visible}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{white-space:pre;font-variant-numeric:tabular-nums}
.narrow{display:none;max-width:480px}
.figure{margin-top:14px}
.caption{margin:14px 0 0;color:var(--muted);font-size:14px;max-width:70ch;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin-top:14px}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
.scroll table{min-width:100%}
th,td{padding:7px 0 7px 28px;border-bottom:1px solid var(--line);text-align:right;font-weight:400;white-space:nowrap;vertical-align:baseline}
th:first-child{padding-left:0;text-align:left;color:var(--muted);position:sticky;left:0;background:var(--page)}
thead th{font-weight:650;border-bottom:1.5px solid var(--muted);color:var(--colour)}
td b{font-weight:680}
.settings td,.settings th{white-space:normal;text-align:left;overflow-wrap:anywhere}
.settings th{padding-right:12px;white-space:nowrap}
.masks{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:36px 32px;margin-top:20px}
.masks figure{margin:0;min-width:0}
.masks h3{margin:0 0 10px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:14px;align-items:start}
.pair img{display:block;width:100%;max-height:320px;image-rendering:pixelated;background:var(--panel);outline:1px solid var(--line)}
.masks figcaption{margin-top:8px;color:var(--muted);font-size:13px;line-height:1.45}
pre{margin:14px 0 0;padding:18px 20px;background:var(--panel);border-radius:10px;font:13.5px/1.55 var(--mono);white-space:pre-wrap;overflow-wrap:anywhere}
code{font:.92em var(--mono);overflow-wrap:anywhere}
details{border-top:1px solid var(--line);padding:12px 0}
details:last-of-type{border-bottom:1px solid var(--line)}
summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}
ul.notes{margin:12px 0 0;padding-left:20px;max-width:72ch}
ul.notes li{margin:6px 0}
footer{margin-top:64px;color:var(--muted);font-size:13px;overflow-wrap:anywhere}
@media (max-width:700px){
main{padding:32px 20px 64px}
h1{font-size:28px}
h2{font-size:19px}
section{margin-top:48px}
.card{padding:16px 18px 18px}
.numbers{grid-template-columns:repeat(2,minmax(0,1fr));gap:14px 16px}
.numbers .big{font-size:22px}
.wide{display:none}
.narrow{display:block}
.masks{grid-template-columns:minmax(0,1fr)}
th,td{padding-left:18px}
.scroll th:first-child{white-space:normal;max-width:150px}
}
"""


def style_sheet() -> str:
    """Return the style sheet, colours included."""
    return (
        ":root{color-scheme:light dark;"
        '--font:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;'
        "--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
        f"{_variables(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
        + _RULES.replace("\n", "")
    )


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{role}:{colour};" for role, colour in colours.items())
