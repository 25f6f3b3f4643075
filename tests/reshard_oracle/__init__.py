"""What a hand-over between unequal TP sizes must do, worked out without the code that does it.

`model` says the value of every cache element and which of them a rank holds; `rank` is a rank's memory, written by its
own arithmetic, and the manifest that describes it; `handover` carries out a plan between such ranks and compares every
byte; `worlds` draws whole pairs of servers. From the package under test come only the words of a description (Role,
Axis, Manifest, ...).
"""
