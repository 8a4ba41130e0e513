"""The training steps that most tests of compiled steps use."""


def train(model, optim, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss


def train_silently(model, optim, batch):
    """Return nothing."""
    model(batch).square().mean().backward()
    optim.step()
    optim.zero_grad()


def train_keeping_gradients(model, optim, batch):
    """Clear gradients first, so that those of the last step stay."""
    optim.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    return loss
