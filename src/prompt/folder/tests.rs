use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::prompt::Api;
use crate::prompt::render::{RenderedPrompt, TokenizeError};

/// A temporary folder, removed after the test.
struct Model(TempDir);

impl Model {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fixture =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers/qwen2.json");
        fs::copy(fixture, folder.path().join("tokenizer.json")).unwrap();
        Self(folder)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn config(&self, config: Value) {
        self.write("tokenizer_config.json", &config.to_string());
    }

    fn read(&self) -> Result<ModelFolder, Vec<Error>> {
        ModelFolder::read(self.0.path(), None, Options::default())
    }

    #[track_caller]
    fn check(&self, tools: bool, expected: &str) {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        if tools {
            body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
        }
        let renderer = self.read().unwrap().renderer;
        let prompt = renderer.render(Api::Chat, body.to_string().as_bytes(), 0);
        match prompt {
            Ok(RenderedPrompt::Text(text)) => assert_eq!(text.text, expected),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn the_template_file_has_precedence_over_the_configuration() {
    let model = Model::new();
    model.config(json!({"chat_template": "config", "eos_token": {"content": "<|im_end|>"}}));
    model.check(false, "config");
    model.write("chat_template.jinja", "file {{ eos_token }}");
    model.check(false, "file <|im_end|>");
    model.write("additional_chat_templates/tool_use.jinja", "tools");
    model.check(true, "tools");
    model.check(false, "file <|im_end|>");
    model.write("chat_template.json", r#"{"chat_template": "processor"}"#);
    model.check(false, "processor");
    model.check(true, "tools");
}

#[test]
fn a_configuration_can_have_several_templates() {
    let model = Model::new();
    model.config(json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}));
    model.check(false, "plain");
    model.check(true, "tools");
}

#[test]
fn special_tokens_map_is_used_without_added_tokens_in_the_configuration() {
    let model = Model::new();
    model.write(
        "chat_template.jinja",
        "{{ bos_token }}|{{ eos_token }}|{{ own_token }}",
    );
    model.config(json!({"bos_token": "a", "own_token": "o"}));
    model.write(
        "special_tokens_map.json",
        r#"{"bos_token": {"content": "b"}, "eos_token": "c"}"#,
    );
    model.check(false, "b|c|o");
    model.config(json!({"bos_token": "a", "added_tokens_decoder": {}}));
    model.check(false, "a||");
}

#[test]
fn tokens_that_only_the_configuration_lists_are_added() {
    let model = Model::new();
    model.config(
        json!({"added_tokens_decoder": {"2000": {"content": "<|image_pad|>", "special": true,
        "normalized": false, "lstrip": false, "rstrip": false, "single_word": false}}}),
    );
    let mut ids = Vec::new();
    model
        .read()
        .unwrap()
        .vocabulary
        .encode("a<|image_pad|>", &mut ids)
        .unwrap();
    assert_eq!(ids.last(), Some(&2000));
    assert_eq!(ids.len(), 2);
}

#[test]
fn chats_of_models_rendered_in_code_are_not_tokenized() {
    let model = Model::new();
    model.write("chat_template.jinja", "x");
    model.write("config.json", r#"{"model_type": "gpt_oss"}"#);
    let renderer = model.read().unwrap().renderer;
    let body = br#"{"messages": [{"role": "user", "content": "x"}]}"#;
    assert_eq!(renderer.render(Api::Chat, body, 0), Err(TokenizeError::Api));
    assert!(
        renderer
            .render(Api::Completions, br#"{"prompt": "x"}"#, 0)
            .is_ok()
    );
}

#[test]
fn errors_name_the_file() {
    let model = Model::new();
    let errors = |template: Option<&Path>| {
        let errors = ModelFolder::read(model.0.path(), template, Options::default()).unwrap_err();
        let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
        texts
    };
    let check = |template: Option<&Path>, expected: &[&str]| {
        let found = errors(template);
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.contains(expected), "{found}\n  lacks {expected}");
        }
    };
    model.write("chat_template.jinja", "line\n{% if %}");
    check(
        None,
        &["chat_template.jinja: the chat template: syntax error"],
    );
    check(None, &["line 2"]);
    model.write("tokenizer_config.json", "{");
    check(
        None,
        &["tokenizer_config.json: not JSON", "the chat template"],
    );
    let given = model.0.path().join("given.jinja");
    check(
        Some(&given),
        &[
            "not JSON",
            "file not found; give the file that the engine uses",
        ],
    );
    model.write("tokenizer_config.json", "{}");
    model.write("given.jinja", "{{ x");
    check(Some(&given), &["given.jinja: the chat template"]);
    model.write("given.jinja", "x");
    model.write(
        "tokenizer.json",
        r#"{"model": {"type": "Unigram", "vocab": []}}"#,
    );
    check(Some(&given), &["this kind of tokenizer is not supported"]);
    model.write("tekken.json", "");
    model.write("consolidated.safetensors", "");
    check(Some(&given), &["mistral_common"]);
    fs::remove_file(model.0.path().join("tekken.json")).unwrap();
    fs::remove_file(model.0.path().join("tokenizer.json")).unwrap();
    check(
        Some(&given),
        &["no tokenizer.json; the engine builds its tokenizer"],
    );
    let nowhere = ModelFolder::read(Path::new("/nowhere"), None, Options::default()).unwrap_err();
    assert!(
        nowhere[0]
            .to_string()
            .contains("/nowhere: folder not found")
    );
}

#[test]
fn a_folder_in_mistrals_format_is_recognised_without_its_weights() {
    let is_mistral = |files: &[(&str, &str)]| {
        let model = Model::new();
        model.config(json!({}));
        for (name, text) in files {
            model.write(name, text);
        }
        let refused = model.read().err().unwrap_or_default();
        refused
            .iter()
            .any(|error| matches!(error, Error::Mistral(_)))
    };
    let params = (
        "params.json",
        r#"{"dim": 4096, "n_layers": 32, "vocab_size": 131072}"#,
    );
    let tekken = ("tekken.json", "{}");
    assert!(is_mistral(&[params, tekken]));
    // Its tokenizer is `tokenizer.model.v3`, which is not JSON and was not downloaded.
    assert!(is_mistral(&[params]));
    assert!(is_mistral(&[("consolidated.safetensors.index.json", "{}")]));
    assert!(is_mistral(&[
        tekken,
        ("consolidated-00001-of-00002.safetensors", "")
    ]));
    // Weights of another format are there, so the engine takes the other tokenizer.
    assert!(!is_mistral(&[params, tekken, ("model.safetensors", "")]));
    assert!(!is_mistral(&[tekken]));
    assert!(!is_mistral(&[("params.json", r#"{"temperature": 0.6}"#)]));
}

#[test]
fn architectures_that_the_engine_handles_in_code_are_known_by_their_names() {
    let model = Model::new();
    model.config(json!({"chat_template": "x"}));
    let with = |config: Value| {
        model.write("config.json", &config.to_string());
        model.read()
    };
    let refused = with(json!({"model_type": "x", "architectures": ["MoonshotKimiaForCausalLM"]}));
    let refused = refused.unwrap_err();
    assert!(matches!(&refused[..], [Error::OwnCode(..)]), "{refused:?}");
    assert!(with(json!({"architectures": ["Alpamayo2Super"]})).is_err());
    let in_code = with(json!({"model_type": "x", "architectures": ["DeepseekV41ForCausalLM"]}));
    assert!(!in_code.unwrap().renderer.has_template());
    let plain = with(json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}));
    assert!(plain.unwrap().renderer.has_template());
}

/// The ids are transformers': see the fixture.
#[test]
fn a_tokenizer_of_llamas_class_is_built_as_the_engine_builds_it() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers");
    let expected = fs::read(fixtures.join("llama_class.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let model = Model::new();
    fs::copy(
        fixtures.join("sentencepiece.json"),
        model.0.path().join("tokenizer.json"),
    )
    .unwrap();
    let ids = |vocabulary: &Vocabulary, text: &str| {
        let text = if vocabulary.lacks_first_space(text) {
            format!(" {text}")
        } else {
            text.to_owned()
        };
        let mut ids = Vec::new();
        for piece in vocabulary.pieces(&text) {
            vocabulary.encode(piece, &mut ids).unwrap();
        }
        json!(ids)
    };
    for case in expected["rebuilt"].as_array().unwrap() {
        let mut config = json!({"tokenizer_class": "LlamaTokenizerFast"});
        for key in ["legacy", "add_prefix_space"] {
            if !case[key].is_null() {
                config[key] = case[key].clone();
            }
        }
        model.config(config);
        model.write("config.json", r#"{"model_type": "llama"}"#);
        let vocabulary = model.read().unwrap().vocabulary;
        let texts = expected["texts"].as_array().unwrap().iter();
        for (text, expected) in texts.zip(case["ids"].as_array().unwrap()) {
            let text = text.as_str().unwrap();
            assert_eq!(&ids(&vocabulary, text), expected, "{text:?} {case}");
        }
    }
    // A model whose type is known to name the wrong class is taken as it is.
    let text = "<s>user";
    model.write("config.json", r#"{"model_type": "mistral"}"#);
    let as_it_is = ids(&model.read().unwrap().vocabulary, text);
    model.config(json!({"tokenizer_class": "PreTrainedTokenizerFast"}));
    model.write("config.json", r#"{"model_type": "llama"}"#);
    assert_eq!(ids(&model.read().unwrap().vocabulary, text), as_it_is);
    model.config(json!({"tokenizer_class": "LlamaTokenizer"}));
    assert_ne!(ids(&model.read().unwrap().vocabulary, text), as_it_is);
}
