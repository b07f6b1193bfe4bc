"""Train source models: recipes, ordinary augmentation, and a loop that can be killed."""

from bestta.training.augment import Augment
from bestta.training.loop import Training
from bestta.training.publish import publish
from bestta.training.recipes import Recipe, recipes
from bestta.training.scoring import score
from bestta.training.shift import Shift, measure

__all__ = ["Augment", "Recipe", "Shift", "Training", "measure", "publish", "recipes", "score"]
