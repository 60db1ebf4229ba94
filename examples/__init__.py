"""The model zoo: plain JAX models that know nothing of meshes, and beside each where its arrays may live."""
