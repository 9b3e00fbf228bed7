"""The flags of each command, one file a command. Its ``run`` reads them and does the work.

``run`` takes the words after the command's name and returns the exit status. Heavy modules are
imported only where the work begins, so that wrong flags are refused at once. What a command does
is in the file or folder of its name in ``cli``, or in the room that ``run`` imports from.
"""
