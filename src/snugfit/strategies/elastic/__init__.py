"""ElasticTrainer: tensor selection at run time."""
