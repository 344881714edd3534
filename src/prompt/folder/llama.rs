//! Tokenizers of Llama 2's kind as transformers 5 builds them: from their class, not from what `tokenizer.json` says of white
//! space. Their vocabulary stays; a space is put before the first text, before each, or before none, as the configuration says.
//! Pure.

use serde_json::{Map, Value, json};

/// Model types for which transformers 5.19 takes `tokenizer.json` as it is, whatever class the configuration names.
const AS_IT_IS: &[&str] = &[
    "EvollaModel",
    "arctic",
    "aria",
    "bigbird_pegasus",
    "camembertv2-base",
    "canary",
    "chameleon",
    "chatlm",
    "cohere_asr",
    "deepseek_ocr",
    "deepseek_ocr2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "deepseek_vl_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "flex_olmo",
    "fuyu",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v",
    "glm4v_moe",
    "glm_image",
    "glmasr",
    "got_ocr2",
    "gpt_bigcode",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "h2ovl_chat",
    "hyperclovax",
    "hyperclovax_vlm",
    "internlm2",
    "jamba",
    "janus",
    "kimi_k25",
    "kimi_linear",
    "kosmos-2",
    "llava",
    "llava_next",
    "mimo_v2_flash",
    "minicpm3",
    "minicpmv",
    "minicpmv4_6",
    "minicpmv4_7",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "modernbert",
    "modernbert-decoder",
    "molmo",
    "molmo2",
    "nemotron",
    "nvfp4",
    "nystromformer",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "opencua",
    "openvla",
    "paddleocr_vl",
    "pegasus_x",
    "persimmon",
    "phi3",
    "phi3_v",
    "phimoe",
    "pix2struct",
    "pixtral",
    "smolvlm",
    "stablelm",
    "step3_vl",
    "step3p5",
    "umt5",
    "vipllava",
    "voxtral",
    "voxtral_realtime",
    "xlm-roberta-xl",
    // These get another class.
    "hyperclovax_vision_v2",
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen4_exp",
];

/// A tokenizer as the engine has it.
pub(super) struct Rebuilt {
    pub(super) tokenizer: Value,
    /// A text that begins with neither a space nor an added token gets a space.
    pub(super) begins_with_space: bool,
}

/// Rebuilds a tokenizer if the engine does.
pub(super) fn rebuilt(tokenizer: Value, config: &Map<String, Value>, model_type: &str) -> Rebuilt {
    let class = config.get("tokenizer_class").and_then(Value::as_str);
    let is_of_class = matches!(class, Some("LlamaTokenizer" | "LlamaTokenizerFast"));
    let has_own_code = config.get("auto_map").is_some();
    let is_kept = AS_IT_IS.contains(&model_type) || has_own_code;
    // A vocabulary of bytes under this class is a mistake that the model's users have noticed otherwise.
    let is_of_spaces = tokenizer["model"]["type"] == "BPE" && !has_byte_level(&tokenizer);
    if !is_of_class || is_kept || !is_of_spaces {
        return Rebuilt {
            tokenizer,
            begins_with_space: false,
        };
    }
    let is = |key: &str, default: bool| config.get(key).and_then(Value::as_bool).unwrap_or(default);
    let (prepends, is_legacy) = (is("add_prefix_space", true), is("legacy", false));
    Rebuilt {
        tokenizer: with_spaces(tokenizer, prepends && is_legacy),
        begins_with_space: prepends && !is_legacy,
    }
}

/// Spaces as marks; one before each text between added tokens, if wanted, unless the text begins with a space.
fn with_spaces(mut tokenizer: Value, before_each: bool) -> Value {
    let marks = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepended = json!({"type": "Prepend", "prepend": "▁"});
    let once = json!({"type": "Replace", "pattern": {"Regex": "^▁▁"}, "content": "▁"});
    tokenizer["normalizer"] = if before_each {
        json!({"type": "Sequence", "normalizers": [prepended, marks, once]})
    } else {
        marks
    };
    tokenizer["pre_tokenizer"] = Value::Null;
    tokenizer["model"]["fuse_unk"] = true.into();
    tokenizer["model"]["byte_fallback"] = true.into();
    // Without a normalizer of its own the engine's tokenizer finds all of them in the raw text.
    for token in tokenizer["added_tokens"]
        .as_array_mut()
        .into_iter()
        .flatten()
    {
        token["normalized"] = false.into();
    }
    tokenizer
}

/// Whether its steps treat a text as bytes.
fn has_byte_level(tokenizer: &Value) -> bool {
    let mut parts = ["pre_tokenizer", "decoder"].into_iter();
    parts.any(|part| tokenizer[part].to_string().contains("\"ByteLevel\""))
}
