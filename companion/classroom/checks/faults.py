"""Five loops, each with one fault that is made every day. Notebook 01 hands them out.

They run without an error and print falling numbers; that is what makes them worth a look.
The notebook's cells and the functions here are the same text (a test holds them together).
"""

import torch
import torch.nn.functional as F


def train_a(model, optimizer, batches):
    """Train on each batch once. Returns the losses."""
    losses = []
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_b(model, optimizer, batches):
    """Train a classifier on each batch once. Returns the losses."""
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        probabilities = model(inputs).softmax(dim=-1)
        loss = F.cross_entropy(probabilities, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def seconds_per_step(step, synchronize, clock, steps=20):
    """Seconds of one call of `step` in the steady state, read from `clock()`."""
    start = clock()
    for _ in range(steps):
        step()
    return (clock() - start) / steps


def train_d(model, optimizer, batches, held_out):
    """Train on each batch once, with a held-out loss after each. Returns those."""
    inputs_held, targets_held = held_out
    history = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(inputs_held), targets_held)
        history.append(loss.item())
    return history


def train_e(model, optimizer, inputs, targets, steps=60):
    """Train, then return the loss on the 20 held-out samples, the first ones."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(inputs[:20]), targets[:20]).item()
