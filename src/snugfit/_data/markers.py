"""Files by which the folders of data sets are found, for modules that are imported only once they read one."""

VWW = tuple(f"annotations/instances_{part}{year}.json" for year in (2014, 2017) for part in ("train", "val"))
CUB = ("train_test_split.txt", "image_class_labels.txt", "classes.txt")
PETS = ("annotations/trainval.txt", "annotations/test.txt")
DOGS = ("train_list.mat", "test_list.mat")
