"""YOLOv2's loss and mAP once more, slow and obvious: loops over images, cells, anchors and boxes."""

from math import exp, log


def sigmoid(x):
    return 1 / (1 + exp(-x))


def overlap(one, other):
    left, right = (max(a[0] - a[2] / 2 for a in (one, other)), min(a[0] + a[2] / 2 for a in (one, other)))
    top, bottom = (max(a[1] - a[3] / 2 for a in (one, other)), min(a[1] + a[3] / 2 for a in (one, other)))
    shared = max(right - left, 0) * max(bottom - top, 0)
    return shared / (one[2] * one[3] + other[2] * other[3] - shared)


def softmax(logits):
    total = sum(exp(x) for x in logits)
    return [exp(x) / total for x in logits]


def predicted(outputs, anchors, classes):
    """Every predictor of one image, by anchor, row and column: its five numbers, logits and box."""
    rows, columns = len(outputs[0]), len(outputs[0][0])
    found = {}
    for number, (width, height) in enumerate(anchors):
        for row in range(rows):
            for column in range(columns):
                said = [outputs[number * (5 + classes) + k][row][column] for k in range(5 + classes)]
                box = (
                    (sigmoid(said[0]) + column) / columns, (sigmoid(said[1]) + row) / rows,
                    width * exp(said[2]), height * exp(said[3]),
                )  # fmt: skip
                found[number, row, column] = (said, box)
    return found


def loss(outputs, targets, anchors, classes):
    """Mean over images of what darknet's region layer minimises; lists of numbers all through."""
    total = 0.0
    for image, listed in zip(outputs, targets, strict=True):
        rows, columns = len(image[0]), len(image[0][0])
        found = predicted(image, anchors, classes)
        boxes = [each for each in listed if each[0] >= 0]
        answers = {}
        for label, *box in boxes:
            row, column = min(int(box[1] * rows), rows - 1), min(int(box[0] * columns), columns - 1)
            shapes = [overlap((0, 0, *box[2:]), (0, 0, *anchor)) for anchor in anchors]
            answers[shapes.index(max(shapes)), row, column] = (int(label), box)
        for place, (said, box) in found.items():
            sure = sigmoid(said[4])
            if place not in answers:
                best = max((overlap(box, other[1:]) for other in boxes), default=0)
                total += 0.5 * sure**2 if best <= 0.6 else 0
                continue
            label, truth = answers[place]
            number, row, column = place
            weight = 2 - truth[2] * truth[3]
            total += 0.5 * weight * (truth[0] * columns - column - sigmoid(said[0])) ** 2
            total += 0.5 * weight * (truth[1] * rows - row - sigmoid(said[1])) ** 2
            total += 0.5 * weight * (log(truth[2] / anchors[number][0]) - said[2]) ** 2
            total += 0.5 * weight * (log(truth[3] / anchors[number][1]) - said[3]) ** 2
            total += 0.5 * 5 * (overlap(box, truth) - sure) ** 2
            total -= log(softmax(said[5:])[label])
    return total / len(outputs)


def surely(found, threshold, beyond):
    """Greedy suppression, one box after the other; ``found`` are (score, class, box)."""
    kept = []
    for score, label, box in sorted(found, key=lambda each: -each[0]):
        clash = any(label == other[1] and overlap(box, other[2]) > beyond for other in kept)
        if score >= threshold and not clash:
            kept.append((score, label, box))
    return kept


def mean_average_precision(images, classes):
    """mAP50 of images, each (found, truths); the curve's area as a sum over all recalls, precision looked up ahead."""
    averages = []
    for label in range(classes):
        objects = sum(truth[0] == label for _, truths in images for truth in truths)
        if not objects:
            continue
        ranked = sorted(
            ((each, number) for number, (found, _) in enumerate(images) for each in found if each[1] == label),
            key=lambda pair: -pair[0][0],
        )
        taken, curve, hits = set(), [], 0
        for count, ((_, _, box), number) in enumerate(ranked, start=1):
            rivals = [(overlap(box, t[1:]), -k) for k, t in enumerate(images[number][1]) if t[0] == label]
            best, place = max(rivals, default=(0, 0))
            if best >= 0.5 and (number, place) not in taken:
                taken.add((number, place))
                hits += 1
            curve.append((hits / objects, hits / count))
        area, reached = 0.0, 0.0
        for recall, _ in curve:
            area += (recall - reached) * max(p for r, p in curve if r >= recall)
            reached = recall
        averages.append(area)
    return sum(averages) / len(averages) if averages else 0.0
