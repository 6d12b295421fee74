"""Small models trained by unmodified megatron-core wheels on CPU with gloo.

    case.py      Case: one way to build and run a model; `case.reference` is the same in one process
    runtime.py   on_megatron: run a function on ranks where `import megatron.core` gives a version of our choice
    install.py   what is replaced for that, each name with its reason (standins.py, packages.py: by what)
    wheels.py    the wheels of several versions, unpacked next to each other
    data.py      batches by the global index of a sample: the same ones however they are cut
    models.py    parallel, Training: process groups, model chunks, optimizer, a training step
    shards.py    filled, whole_grads, whole_parameters: logical parameters, whatever the layout
    layers.py    stand-ins for layers that only TransformerEngine has, given through the layer spec
    versions.py  what differs between versions

`models`, `shards` and `layers` import megatron, so import them inside the function that runs on the ranks:

    def trained(case: Case) -> dict[str, Tensor]:
        from zoo.harness.megatron.models import Training, parallel
        from zoo.harness.megatron.shards import filled, whole_grads

        with parallel(case):                # megatron's process groups, undone at the end: one launch, many cases
            training = Training(case)       # .chunks (DDP around each), .optimizer, .config
            filled(training.chunks)         # parameters by name, the same in every layout
            training.step()                 # zero, forward and backward by schedule, finalize, optimizer.step()
            return whole_grads(training.chunks)

    [reference] = on_megatron(1, trained, Case())
    candidates = on_megatron(2, trained, Case(tp=2, sp=True))

`training.step(number, batch)` passes every microbatch (a dict of tokens, labels, loss_mask, position_ids and
attention_mask, before context parallelism cuts it) through `batch`.
"""
