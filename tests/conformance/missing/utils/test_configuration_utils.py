"""Stands in for a module that the source distribution leaves out: values unlike the defaults for the common fields."""

config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "architectures": ["SomeModel"],
    "id2label": {0: "no", 1: "yes", 2: "perhaps"},
    "label2id": {"no": 0, "yes": 1, "perhaps": 2},
    "problem_type": "multi_label_classification",
}
