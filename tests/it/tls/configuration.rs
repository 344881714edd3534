//! What a check of the configuration says of certificates.

use warmroute::config::Config;

use super::ca::{Ca, Folder};

/// The problems of a file that ends with this.
fn problems(text: &str) -> String {
    let text = format!("workers: ['http://127.0.0.1:1']\n{text}");
    match Config::parse("x.yaml", &text) {
        Ok(_) => String::new(),
        Err(problems) => problems.to_string(),
    }
}

#[test]
fn bad_pairs_are_reported_with_line_and_path() {
    let (ca, folder) = (Ca::new("ca"), Folder::new());
    let (good, other) = (ca.issue(&["localhost"]), ca.issue(&["localhost"]));
    let expired = ca.issue_for_years(&["localhost"], 2020, 2021);
    let early = ca.issue_for_years(&["localhost"], 2090, 2091);
    let good_certificate = folder.write("good.crt", &good.certificate);
    let good_key = folder.write("good.key", &good.key);
    let other_key = folder.write("other.key", &other.key);
    let listener = |certificate: &str, key: &str| {
        problems(&format!(
            "api:\n  tls:\n    certificate: {certificate}\n    key: {key}\n"
        ))
    };
    assert_eq!(listener(&good_certificate, &good_key), "");
    let check = |certificate: &str, key: &str, expected: &[&str]| {
        let found = listener(certificate, key);
        for expected in expected {
            assert!(found.contains(expected), "{expected}: {found}");
        }
    };
    check(
        &good_certificate,
        &other_key,
        &[
            "x.yaml:5:",
            "api.tls.key: `",
            "is not the key of the certificate in",
        ],
    );
    let file = folder.write("expired.crt", &expired.certificate);
    let key = folder.write("expired.key", &expired.key);
    check(
        &file,
        &key,
        &[
            "x.yaml:4:",
            "api.tls.certificate: `",
            "expired at 2021-01-01T00:00:00Z",
        ],
    );
    let file = folder.write("early.crt", &early.certificate);
    let key = folder.write("early.key", &early.key);
    check(&file, &key, &["is not valid before 2090-01-01T00:00:00Z"]);
    check(
        "/missing.crt",
        "/missing.key",
        &["x.yaml:4:", "x.yaml:5:", "cannot be read"],
    );
    check(
        &good_key,
        &good_key,
        &["api.tls.certificate: `", "has no certificate"],
    );
    check(
        &good_certificate,
        &good_certificate,
        &["api.tls.key: `", "has no private key"],
    );
    check(
        &good_certificate,
        "''",
        &["api.tls.key: is needed beside `certificate`"],
    );
    let encrypted =
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMA==\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let encrypted = folder.write("encrypted.key", encrypted);
    check(
        &good_certificate,
        &encrypted,
        &["is encrypted; write it without a passphrase"],
    );
}

#[test]
fn settings_that_do_not_fit_together_are_reported() {
    let (ca, folder) = (Ca::new("ca"), Folder::new());
    let settings = folder.server(&ca.issue(&["localhost"]));
    let pair = format!(
        "certificate: {}, key: {}",
        settings.certificate, settings.key
    );
    let ca_file = folder.write("ca.crt", &ca.pem());
    let check = |text: String, expected: &str| {
        let found = problems(&text);
        assert!(found.contains(expected), "{expected}: {found}");
    };
    check(
        "api: {tls: {}}\n".to_owned(),
        "api.tls.certificate: is needed",
    );
    check(
        format!("endpoint_picker: {{tls: {{{pair}, self_signed: true}}}}\n"),
        "endpoint_picker.tls.self_signed: leave it out",
    );
    assert_eq!(
        problems("endpoint_picker: {listen: ':9002', tls: {self_signed: true}}\n"),
        ""
    );
    check(
        format!("peers: {{listen: ':9701', tls: {{self_signed: true, client_ca: {ca_file}}}}}\n"),
        "peers.tls.self_signed: cannot be used",
    );
    check(
        format!("admin: {{tls: {{{pair}, client_names: [a]}}}}\n"),
        "admin.tls.client_names: needs `client_ca`",
    );
    check(
        format!("api: {{tls: {{{pair}, client_ca: {ca_file}, client_names: ['*.a']}}}}\n"),
        "api.tls.client_names[0]: `*.a`: wildcards are not supported",
    );
    let peers = "listen: ':9701', discovery: [{dns: {name: peers}}]";
    check(
        format!("responses: {{mode: pass_through}}\npeers: {{{peers}, tls: {{{pair}}}}}\n"),
        "peers.tls.client_ca: is needed",
    );
    // With certificates other hosts need no secret.
    let tls = format!("tls: {{{pair}, client_ca: {ca_file}}}");
    let found = problems(&format!(
        "responses: {{mode: pass_through}}\npeers: {{{peers}, {tls}}}\n"
    ));
    assert_eq!(found, "");
    check(
        "discovery: [{dns: {name: engines, tls: {ca: /missing}}}]\n".to_owned(),
        "discovery[0].dns.tls.ca: `/missing` cannot be read",
    );
    let worker = "{url: 'https://h', tls: {certificate: /missing}}";
    check(
        format!("discovery: [{{static: {{workers: [{worker}]}}}}]\n"),
        "discovery[0].static.workers[0].tls.key: is needed beside `certificate`",
    );
}
