//! Any bytes as a client's body. If anything is read from a text without an error, the text is a JSON object; and rendering never panics.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use serde_json::Map;
use serde_json::value::RawValue;
use warmroute::prompt::render::{Options, Renderer, Templates};
use warmroute::prompt::template::Template;
use warmroute::prompt::{self, Api};

/// Prints all that a template sees.
static RENDERER: LazyLock<Renderer> = LazyLock::new(|| {
    let source = "{% for m in messages %}{{ m.role + ':' }}{{ m | tojson }}{% endfor %}{{ tools | tojson }}{{ documents | tojson }}";
    let templates = Templates {
        plain: Some(Template::new(source).expect("the template is right")),
        with_tools: None,
    };
    Renderer::new(templates, Map::new(), Options::default())
});

const APIS: [Api; 5] = [
    Api::Chat,
    Api::Completions,
    Api::Responses,
    Api::Messages,
    Api::Other,
];

// The first byte chooses the API.
fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, body)) = bytes.split_first() else {
        return;
    };
    let api = APIS[usize::from(choice) % APIS.len()];
    // What is in members that are not read may be no text.
    if let (Ok(_), Ok(text)) = (prompt::peek(api, body, 64), str::from_utf8(body)) {
        let value: &RawValue = serde_json::from_str(text).expect("what was read is JSON");
        assert!(value.get().starts_with('{'));
    }
    let _ = RENDERER.render(api, body, 1_800_000_000);
});
