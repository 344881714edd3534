//! Keys that earlier versions had. A file that still has one is read, with a warning; the next version refuses it as an
//! unknown key.

/// Path, without the places in lists, and why the key is gone.
const RETIRED: [(&str, &str); 9] = [
    ("routing.prefill_weight", COST),
    ("routing.decode_weight", COST),
    ("routing.slow_decode_tokens", COST),
    ("routing.adapter_load_tokens", COST),
    ("models.prefill_weight", COST),
    ("models.decode_weight", COST),
    (
        "fleet.learn_prefill_rates",
        "speeds are always learnt; a worker's `prefill_rate` counts before what is learnt",
    ),
    (
        "queue.advanced.quantum_tokens",
        "next is the tenant that was sent the fewest tokens",
    ),
    (
        "queue.advanced.assumed_prefill_rate",
        "what is learnt of the workers' speeds counts",
    ),
];

const COST: &str =
    "the cost is in seconds and has no weights; what it needs is learnt (docs/concepts.md)";

/// Why the key at `path` is not used any more, if it was one.
pub(super) fn reason(path: &str) -> Option<&'static str> {
    let mut parts = path.split('[');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain.push_str(part.split_once(']').map_or("", |(_, rest)| rest));
    }
    let mut retired = RETIRED.iter();
    let (_, reason) = retired.find(|(path, _)| *path == plain)?;
    Some(reason)
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn a_file_with_a_key_of_before_is_read_and_told_of_it() {
        let text = "workers: ['http://a:1']\nrouting: {prefill_weight: 4}\nmodels:\n- {name: m, decode_weight: much}\n";
        let config = Config::parse("c.yaml", text).unwrap();
        let [first, second] = config.source.warnings() else {
            panic!("{:?}", config.source.warnings());
        };
        assert!(
            first.starts_with(
                "c.yaml:2:11: routing.prefill_weight: is not used any more: the cost is in seconds"
            ),
            "{first}"
        );
        assert!(
            second.starts_with("c.yaml:4:13: models[0].decode_weight: is not used"),
            "{second}"
        );
        let never = "workers: ['http://a:1']\nrouting: {decode_wait: 4}\n";
        assert!(Config::parse("c.yaml", never).is_err());
    }
}
