"""What every integration does in an impossible budget; sent to fresh processes as source."""


def refusal(train):
    """What an impossible budget says, whether the limit is lifted, and a training in the smallest one that it names.

    Call it once all libraries are imported: what they take is at rest.
    """
    import resource

    import snugfit
    from snugfit.errors import InfeasibleBudgetError

    snugfit.prepare_process(1)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    message, smallest = "", 0
    try:
        train("9MB")
    except InfeasibleBudgetError as error:
        message, smallest = str(error), error.smallest_bytes
    restored = resource.getrlimit(resource.RLIMIT_DATA) == before
    return {"message": message, "restored": restored, "record": train(smallest)}
