"""The keys of `top`, and the page that lists them; as in nvitop, k9s and btop where they agree."""

from __future__ import annotations

from typing import Final

from textual.binding import Binding, BindingType

HELP: Final = """
 q ctrl-c      leave                        ? h           this help; esc goes back
 up down j k   move; g G first and last     pgup pgdn     a page
 enter         the slot under the cursor    e d n u       events, cards, nodes, runs
 /             filter: state:lost temp>75 cap>3GiB !node:pc1 /regex/ word
 < > , .       sort by the column before or after; o by its name; r turns the order; 0 worst first
 c             choose columns; space takes one away or back
 space         mark the slot for a command; a new filter clears the marks
 P U D R C     pause, resume, drain, reinstate, cap: the marked slots, or the one under the cursor; asks first
 m             how far back the courses of a slot go: 2 m, 10 m, 1 h, all
 t             replay; left right 1 s, [ ] 1 min, home start, end last sample, p plays
 s             save this screen as text in the present folder
"""

BINDINGS: Final[list[BindingType]] = [
    Binding("q,ctrl+c", "quit"),
    Binding("question_mark,h", "page('help')"),
    Binding("e", "page('events')"),
    Binding("d", "page('cards')"),
    Binding("enter", "page('slot')"),
    Binding("escape", "leave"),
    Binding("down,j", "move(1)"),
    Binding("up,k", "move(-1)"),
    Binding("pagedown", "move_pages(1)"),
    Binding("pageup", "move_pages(-1)"),
    Binding("g", "move(-1000000)"),
    Binding("G", "move(1000000)"),
    Binding("slash", "ask('filter')"),
    Binding("greater_than_sign,full_stop", "sort(1)"),
    Binding("less_than_sign,comma", "sort(-1)"),
    Binding("r", "reverse"),
    Binding("0", "worst"),
    Binding("o", "ask('sort')"),
    Binding("c", "page('columns')"),
    Binding("n", "page('nodes')"),
    Binding("u", "page('runs')"),
    Binding("space", "pick"),
    Binding("P", "command('pause')"),
    Binding("U", "command('resume')"),
    Binding("D", "command('drain')"),
    Binding("R", "command('reinstate')"),
    Binding("C", "command('cap')"),
    Binding("y", "yes"),
    Binding("m", "range"),
    Binding("t", "replay"),
    Binding("left", "seek(-1)"),
    Binding("right", "seek(1)"),
    Binding("left_square_bracket", "seek(-60)"),
    Binding("right_square_bracket", "seek(60)"),
    Binding("home", "seek(-1000000000)"),
    Binding("end", "seek(1000000000)"),
    Binding("p", "play"),
    Binding("s", "save"),
]
