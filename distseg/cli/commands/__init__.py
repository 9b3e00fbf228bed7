"""The flags of each command, one file a command; each file's ``run`` reads them and does the work.

Heavy modules are imported only where the work begins, so that wrong flags are refused at once.
What a command does stands in the file of its name in the folder above.
"""
