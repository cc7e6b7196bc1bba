"""The text that is measured when nobody gives one. Imports nothing."""

TEXT = """\
A river that has run its course for a thousand years does not dig its bed anew each morning. It \
follows the channel that yesterday's water left behind, and spends its strength on the next few \
inches of clay. A program that writes text word by word can work in the same manner. Each new \
word depends on every word before it, yet the work done for those earlier words does not change \
once they are fixed. Whoever keeps the results of that work needs only to add a little for the \
newest word; whoever throws them away has to start from the first word again, and the longer the \
text grows, the more is repeated.

There is a price, as there always is. What is kept has to lie somewhere, and it must be read \
again for every word that follows. A short note hardly matters, but a long report fills shelf \
after shelf, and even fetching the notes takes time. The clerk who keeps a tidy archive is fast \
for as long as the archive fits in the room. So it is worth asking, for a given desk and a given \
stack of paper, how much is saved, how much room it takes, and from which page on the archive \
itself becomes the slowest part of the work. Those are questions for a clock and a scale, not \
for a guess.
"""
