use proptest::prelude::*;

use super::*;

fn config(text: &str) -> Config {
    Config::parse("config.yaml", text).unwrap()
}

fn changes(old: &str, new: &str) -> Vec<Change> {
    Comparable::of(&config(old)).changes(&Comparable::of(&config(new)))
}

fn check(old: &str, new: &str, expected: &[&str]) {
    let found: Vec<String> = changes(old, new).iter().map(Change::to_string).collect();
    assert_eq!(found, expected);
}

const ONE: &str = "workers: ['http://a:1']\n";

#[test]
fn a_default_that_is_written_out_changes_nothing() {
    check(
        ONE,
        "workers: [{url: 'http://a:1', draining: false}]\nrequests: {max_attempts: 3}\n",
        &[],
    );
}

#[test]
fn a_value_is_shown_before_and_after() {
    let new = format!("{ONE}reload: {{watch_interval: 1m}}\n");
    check(ONE, &new, &["~ reload.watch_interval: 2s -> 1m"]);
    let new = format!("{ONE}api: {{listen: ':1'}}\n");
    check(ONE, &new, &["~ api.listen: :8080 -> :1 (needs a restart)"]);
}

#[test]
fn a_worker_that_is_taken_out_changes_none_of_the_others() {
    check(
        "workers: ['http://a:1', 'http://b:1', 'http://c:1']\n",
        "workers: ['http://b:1', {url: 'http://c:1', draining: true}, 'http://d:1']\n",
        &[
            "- workers[http://a:1]",
            "~ workers[http://c:1].draining: false -> true",
            "+ workers[http://d:1]",
        ],
    );
}

#[test]
fn entries_of_discovery_are_compared_by_what_they_name() {
    check(
        "discovery: [{file: {path: x}}, {dns: {name: y}}]\n",
        "discovery: [{dns: {name: y, responses: chat}}, {static: {workers: ['http://a:1']}}]\n",
        &[
            "~ discovery[dns y].dns.responses: auto -> chat",
            "- discovery[file x]",
            "+ discovery[static]",
        ],
    );
}

#[test]
fn targets_are_compared_by_their_models() {
    let with = |targets: &str| format!("{ONE}models: [{{name: chat, targets: [{targets}]}}]\n");
    check(
        &with("{model: a, weight: 90}, {model: b, weight: 10}"),
        &with("{model: b, weight: 50}, {model: c, weight: 10}"),
        &[
            "- models[chat].targets[a]",
            "~ models[chat].targets[b].weight: 10.0 -> 50.0",
            "+ models[chat].targets[c]",
        ],
    );
}

#[test]
fn the_order_of_a_list_is_a_change() {
    check(
        "workers: ['http://a:1', 'http://b:1']\n",
        "workers: ['http://b:1', 'http://a:1']\n",
        &["~ workers: [\"http://a:1\",\"http://b:1\"] -> [\"http://b:1\",\"http://a:1\"]"],
    );
}

#[test]
fn a_secret_is_compared_and_never_shown() {
    let with = |key: &str| format!("workers: [{{url: 'http://a:1', api_key: '{key}'}}]\n");
    let tenant = |keys: &str| format!("{ONE}tenants: [{{name: t, keys: {keys}}}]\n");
    let path = "workers[http://a:1].api_key";
    check(&with("hush"), &with("hush"), &[]);
    check(
        &with("hush"),
        &with("quiet"),
        &[&format!("~ {path}: changed")],
    );
    check(&with(""), &with("hush"), &[&format!("~ {path}: set")]);
    check(&with("hush"), &with(""), &[&format!("~ {path}: removed")]);
    let found = changes(
        &tenant("[hush-hush-hush-1]"),
        &tenant("[hush-hush-hush-1, quiet-quiet-quiet]"),
    );
    assert_eq!(found.len(), 1);
    assert!(
        found[0]
            .to_string()
            .starts_with("~ tenants[t].keys: changed")
    );
    for change in [changes(&with("hush"), ONE), found].concat() {
        let all = format!(
            "{change} {change:?} {}",
            serde_json::to_string(&change).unwrap()
        );
        assert!(!all.contains("hush") && !all.contains("quiet"), "{all}");
        // Nor a digest, which a short secret can be found by.
        assert!(!all.contains("***["), "{all}");
    }
}

#[test]
fn a_running_configuration_is_compared_without_its_secrets() {
    let with = |key: &str| {
        config(&format!(
            "workers: [{{url: 'http://a:1', api_key: '{key}'}}]\n"
        ))
    };
    let running = Comparable::from_shown(Comparable::of(&with("hush")).shown());
    let same = Comparable::of(&with("quiet")).without_digests();
    assert_eq!(running.changes(&same), []);
    let none = Comparable::of(&with("")).without_digests();
    assert_eq!(running.changes(&none).len(), 1);
}

#[test]
fn a_change_knows_its_place_in_the_new_file() {
    let new = "workers: ['http://b:1', {url: 'http://a:1', draining: true}]\n";
    let found = changes("workers: ['http://a:1', 'http://b:1']\n", new);
    assert_eq!(found[0].file_path, "workers[1].draining");
}

proptest! {
    /// Any two lists of workers: what is reported is exactly what differs.
    #[test]
    fn each_worker_is_reported_once(
        old in proptest::collection::btree_map(0u8..8, any::<bool>(), 1..8),
        new in proptest::collection::btree_map(0u8..8, any::<bool>(), 1..8),
    ) {
        let list = |workers: &BTreeMap<u8, bool>| {
            let workers = workers.iter();
            let workers = workers.map(|(n, draining)| format!("  - {{url: 'http://w{n}:1', draining: {draining}}}\n"));
            format!("workers:\n{}", workers.collect::<String>())
        };
        let differs = (0..8).filter(|n| old.get(n) != new.get(n)).count();
        let found = changes(&list(&old), &list(&new));
        prop_assert_eq!(found.len(), differs);
        prop_assert!(found.iter().all(|change| change.effect == Effect::Reload));
    }
}
