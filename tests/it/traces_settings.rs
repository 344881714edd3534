//! Traces in the configuration of a build without the feature `otlp`.

#[cfg(not(feature = "otlp"))]
#[test]
fn a_build_without_the_feature_names_it() {
    let text = "workers: [\"http://h:1\"]\ntraces: {endpoint: \"http://otel:4317\"}\n";
    let found = warmroute::config::Config::parse("test.yaml", text);
    let found = found.unwrap_err().to_string();
    for part in ["test.yaml:2", "traces", "the feature `otlp`"] {
        assert!(found.contains(part), "{part}: {found}");
    }
}
