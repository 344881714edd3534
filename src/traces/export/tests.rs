use super::*;

fn with(settings: Option<&str>, variables: &[(&str, &str)]) -> Asked {
    let settings = settings.map(|text| serde_json::from_str::<Settings>(text).unwrap());
    let read = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    asked(settings.as_ref(), &read)
}

fn export_of(settings: Option<&str>, variables: &[(&str, &str)]) -> Export {
    let asked = with(settings, variables);
    assert_eq!(asked.warnings, Vec::<String>::new(), "{variables:?}");
    asked.export.expect("is on")
}

const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317");

#[test]
fn traces_are_on_if_the_file_or_a_variable_asks_for_them() {
    let check = |settings, variables: &[(&str, &str)], expected: bool| {
        let found = with(settings, variables).export.is_some();
        assert_eq!(found, expected, "{settings:?} {variables:?}");
    };
    check(None, &[], false);
    check(None, &[("OTEL_SERVICE_NAME", "x")], false);
    check(Some("{}"), &[], true);
    check(None, &[ENDPOINT], true);
    check(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")], false);
    check(
        None,
        &[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c:1")],
        true,
    );
    check(None, &[("OTEL_TRACES_EXPORTER", "otlp")], true);
    check(Some("{}"), &[("OTEL_TRACES_EXPORTER", "none")], false);
    check(Some("{}"), &[("OTEL_SDK_DISABLED", "true")], false);
    check(Some("{}"), &[("OTEL_SDK_DISABLED", "false")], true);
}

#[test]
fn an_endpoint_gets_the_port_and_the_path_of_its_protocol() {
    let check = |settings: &str, variables: &[(&str, &str)], expected: &str| {
        let found = export_of(Some(settings), variables).endpoint;
        let scheme = if found.tls.is_some() { "https" } else { "http" };
        let found = format!("{scheme}://{}{}", found.authority, found.path);
        assert_eq!(found, expected, "{settings} {variables:?}");
    };
    let http = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
    check("{}", &[], "http://localhost:4317");
    check("{}", &[http], "http://localhost:4318/v1/traces");
    check(r#"{"endpoint": "http://c"}"#, &[], "http://c:4317");
    check(r#"{"endpoint": "https://c:1"}"#, &[], "https://c:1");
    check(
        r#"{"endpoint": "http://c/own"}"#,
        &[http],
        "http://c:4318/own",
    );
    check(
        r#"{"endpoint": "http://c/"}"#,
        &[http],
        "http://c:4318/v1/traces",
    );
    check(
        r#"{"endpoint": "http://c:1"}"#,
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://d:2")],
        "http://d:2",
    );
    check(
        "{}",
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://d:2"), http],
        "http://d:2/v1/traces",
    );
    check(
        "{}",
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://d:2/a/"), http],
        "http://d:2/a/v1/traces",
    );
    check(
        "{}",
        &[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://d:2/a"), http],
        "http://d:2/a",
    );
    check(
        "{}",
        &[
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:3"),
            ENDPOINT,
        ],
        "http://t:3",
    );
    check(
        "{}",
        &[("OTEL_EXPORTER_OTLP_ENDPOINT", "d:2")],
        "http://d:2",
    );
    check(
        "{}",
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "d:2"),
            ("OTEL_EXPORTER_OTLP_INSECURE", "false"),
        ],
        "https://d:2",
    );
}

#[test]
fn the_environment_wins_over_the_file() {
    let file = r#"{"service_name": "file", "sample_ratio": 0.5, "compression": "none",
        "resource_attributes": {"zone": "a", "team": "x"}}"#;
    let found = export_of(Some(file), &[]);
    assert_eq!(found.resource["service.name"], "file");
    assert_eq!(found.sampler, Sampler::new(0.5, true));
    assert_eq!(
        (found.timeout, found.max_queue),
        (Duration::from_secs(10), 8_192)
    );
    let found = export_of(
        Some(file),
        &[
            ("OTEL_SERVICE_NAME", "env"),
            ("OTEL_RESOURCE_ATTRIBUTES", "zone=b%20c, service.name=no"),
            ("OTEL_TRACES_SAMPLER", "traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "500"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "7"),
            ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "3"),
            ("OTEL_BSP_SCHEDULE_DELAY", "100"),
        ],
    );
    let resource: Vec<_> = found
        .resource
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    assert_eq!(resource, ["service.name=env", "team=x", "zone=b c"]);
    assert_eq!(found.sampler, Sampler::new(0.25, false));
    assert_eq!(found.timeout, Duration::from_millis(500));
    assert_eq!(found.compression, Compression::Gzip);
    assert_eq!((found.max_queue, found.max_batch), (7, 3));
    assert_eq!(found.export_interval, Duration::from_millis(100));
}

#[test]
fn every_sampler_of_opentelemetry_is_known() {
    let check = |name, expected| {
        let variables = [
            ENDPOINT,
            ("OTEL_TRACES_SAMPLER", name),
            ("OTEL_TRACES_SAMPLER_ARG", "0.1"),
        ];
        assert_eq!(export_of(None, &variables).sampler, expected, "{name}");
    };
    check("always_on", Sampler::new(1.0, false));
    check("always_off", Sampler::new(0.0, false));
    check("traceidratio", Sampler::new(0.1, false));
    check("parentbased_always_on", Sampler::new(1.0, true));
    check("parentbased_always_off", Sampler::new(0.0, true));
    check("parentbased_traceidratio", Sampler::new(0.1, true));
}

#[test]
fn files_of_tls_are_those_of_the_environment_first() {
    let file = r#"{"endpoint": "https://c:1", "tls": {"ca": "file.crt", "server_name": "x"}}"#;
    let found = export_of(
        Some(file),
        &[
            ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "ca.crt"),
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "tls.crt"),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "tls.key"),
        ],
    );
    let tls = found.endpoint.tls.unwrap();
    assert_eq!(
        [&*tls.ca, &tls.certificate, &tls.key, &tls.server_name],
        ["ca.crt", "tls.crt", "tls.key", "x"]
    );
    assert_eq!(
        export_of(Some(file), &[]).endpoint.tls.unwrap().ca,
        "file.crt"
    );
}

#[test]
fn a_variable_that_cannot_be_used_is_named_and_ignored() {
    let check = |name: &str, value: &str| {
        let found = with(Some("{}"), &[(name, value)]);
        assert_eq!(found.warnings.len(), 1, "{name}={value}");
        assert!(found.warnings[0].contains(name), "{:?}", found.warnings);
        let expected = export_of(Some("{}"), &[]);
        assert_eq!(found.export, Some(expected), "{name}={value}");
    };
    check("OTEL_EXPORTER_OTLP_ENDPOINT", "unix:///socket");
    check("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json");
    check("OTEL_TRACES_SAMPLER", "jaeger_remote");
    check("OTEL_EXPORTER_OTLP_TIMEOUT", "10s");
    check("OTEL_BSP_MAX_QUEUE_SIZE", "0");
    check("OTEL_RESOURCE_ATTRIBUTES", "zone");
    check("OTEL_TRACES_EXPORTER", "zipkin");
}

#[test]
fn a_password_in_a_variable_is_not_shown() {
    for url in ["https://me:secret@c:4317", "https://c:4317?token=secret"] {
        let found = with(Some("{}"), &[("OTEL_EXPORTER_OTLP_ENDPOINT", url)]);
        let [warning] = &*found.warnings else {
            panic!("{:?}", found.warnings);
        };
        assert!(
            warning.contains("without user and query") && !warning.contains("secret"),
            "{warning}"
        );
    }
}

#[test]
fn settings_that_cannot_work_are_problems() {
    let check = |text: &str, expected: &[&str]| {
        let settings: Settings = serde_json::from_str(text).unwrap();
        let found = settings.check();
        let keys: Vec<_> = found.iter().map(|(key, _)| *key).collect();
        assert_eq!(keys, expected, "{found:?}");
    };
    check("{}", &[]);
    check(r#"{"endpoint": "http://c:4317"}"#, &[]);
    check(r#"{"endpoint": "c:4317"}"#, &["endpoint"]);
    check(r#"{"endpoint": "grpc://c:4317"}"#, &["endpoint"]);
    check(r#"{"endpoint": "http://user@c:4317"}"#, &["endpoint"]);
    check(r#"{"endpoint": "http://c:1", "tls": {}}"#, &["tls"]);
    check(r#"{"headers": {"a b": "x"}}"#, &["headers"]);
    check(r#"{"headers": {"x-key": "x"}}"#, &[]);
}
