//! Aliases, weighted targets and fallbacks of the models in a configuration: what the entries say, and what is
//! wrong with them.

use std::collections::BTreeMap;

use super::model::ModelOverride;
use super::reader::Reader;
use crate::relay::request::target::{MAX_FALLBACKS, MAX_TARGETS, NameSettings, Sticky};

/// What the entries say of names. `hash_on` is that of all models without their own.
pub(super) fn of(models: &[ModelOverride], hash_on: &[String]) -> Vec<NameSettings> {
    let settings = |model: &ModelOverride| NameSettings {
        name: model.name.clone(),
        aliases: model.aliases.clone(),
        targets: model.targets.clone(),
        sticky: model.sticky,
        fallback: model.fallback.clone(),
        hash_on: model.hash_on.as_deref().unwrap_or(hash_on).to_vec(),
    };
    models.iter().map(settings).collect()
}

/// Adds what is wrong with the names of a configuration's models.
pub(super) fn check(models: &[ModelOverride], reader: &mut Reader) {
    let names = Names::of(models);
    for (index, model) in models.iter().enumerate() {
        let path = format!("models[{index}]");
        check_aliases(model, &path, &names, reader);
        check_targets(model, &path, &names, reader);
        check_fallback(model, &path, &names, reader);
    }
}

/// Where each name stands.
struct Names<'a> {
    models: &'a [ModelOverride],
    by_name: BTreeMap<&'a str, usize>,
    /// The first entry that has it.
    by_alias: BTreeMap<&'a str, usize>,
}

impl<'a> Names<'a> {
    fn of(models: &'a [ModelOverride]) -> Self {
        let (mut by_name, mut by_alias) = (BTreeMap::new(), BTreeMap::new());
        for (index, model) in models.iter().enumerate() {
            by_name.entry(model.name.as_str()).or_insert(index);
            for alias in &model.aliases {
                by_alias.entry(alias.as_str()).or_insert(index);
            }
        }
        Self {
            models,
            by_name,
            by_alias,
        }
    }

    fn aliased(&self, name: &str) -> Option<&'a str> {
        let index = self.by_alias.get(name)?;
        Some(&self.models[*index].name)
    }

    /// The entry of a name, if it has targets.
    fn split(&self, name: &str) -> Option<&'a ModelOverride> {
        let model = &self.models[*self.by_name.get(name)?];
        (!model.targets.is_empty()).then_some(model)
    }
}

fn check_aliases(model: &ModelOverride, path: &str, names: &Names<'_>, reader: &mut Reader) {
    for (place, alias) in model.aliases.iter().enumerate() {
        let path = format!("{path}.aliases[{place}]");
        let own = names.by_name.get(alias.as_str());
        let first = names.by_alias.get(alias.as_str());
        let is_repeated = model.aliases[..place].contains(alias);
        let is_first = first.is_none_or(|first| std::ptr::eq(&names.models[*first], model));
        if alias.is_empty() {
            reader.problem(&path, "is empty");
        } else if *alias == model.name {
            reader.problem(
                &path,
                format!("`{alias}` is the model's own name; leave it out"),
            );
        } else if let Some(own) = own {
            let message = format!(
                "`{alias}` is the name of models[{own}]; a request for it could mean either, so take one of them out"
            );
            reader.problem(&path, message);
        } else if is_repeated || !is_first {
            let first = first.copied().unwrap_or_default();
            let message = format!("`{alias}` is an alias of models[{first}] already");
            reader.problem(&path, message);
        }
    }
}

fn check_targets(model: &ModelOverride, path: &str, names: &Names<'_>, reader: &mut Reader) {
    let targets = &model.targets;
    if targets.is_empty() {
        if model.sticky != Sticky::None {
            let message = "there are no `targets` to choose from; leave it out";
            reader.problem(&format!("{path}.sticky"), message);
        }
        return;
    }
    if targets.len() > MAX_TARGETS {
        let message = format!("lists {} models; at most {MAX_TARGETS}", targets.len());
        reader.problem(&format!("{path}.targets"), message);
    }
    for (place, target) in targets.iter().enumerate() {
        let name = &target.model;
        let at = format!("{path}.targets[{place}].model");
        let is_repeated = targets[..place].iter().any(|other| other.model == *name);
        if name.is_empty() {
            reader.problem(&at, "is empty");
        } else if is_repeated {
            let message = format!("`{name}` is listed twice; add up the weights");
            reader.problem(&at, message);
        } else if let Some(real) = names.aliased(name) {
            let message = format!("`{name}` is an alias, and targets are models; write `{real}`");
            reader.problem(&at, message);
        } else if *name != model.name && names.split(name).is_some() {
            let message = format!(
                "`{name}` has targets of its own, and targets are models; list those models here"
            );
            reader.problem(&at, message);
        }
        if !target.weight.is_finite() {
            let message = "must be a finite number";
            reader.problem(&format!("{path}.targets[{place}].weight"), message);
        }
    }
    if targets.iter().all(|target| target.weight <= 0.0) {
        let message = "every weight is 0, so that no model would get a request; give one a weight";
        reader.problem(&format!("{path}.targets"), message);
    }
    let is_target = targets.iter().any(|target| target.model == model.name);
    if !is_target && let Some(key) = unused_key(model) {
        let message = format!(
            "has no effect: requests for `{}` go to its targets; write it where they stand under `models`",
            model.name
        );
        reader.problem(&format!("{path}.{key}"), message);
    }
}

/// A setting of the entry that only requests to the model of its name would use.
fn unused_key(model: &ModelOverride) -> Option<&'static str> {
    let keys = [
        ("tokenizer", model.tokenizer.is_some()),
        ("send_token_ids", model.send_token_ids.is_some()),
        ("bytes_per_token", model.bytes_per_token.is_some()),
        ("policy", model.policy.is_some()),
    ];
    let mut keys = keys.into_iter();
    keys.find_map(|(key, is_set)| is_set.then_some(key))
}

fn check_fallback(model: &ModelOverride, path: &str, names: &Names<'_>, reader: &mut Reader) {
    let fallback = &model.fallback;
    let at = |place: usize| match fallback.len() {
        // It may be written without a list.
        1 => format!("{path}.fallback"),
        _ => format!("{path}.fallback[{place}]"),
    };
    if fallback.len() > MAX_FALLBACKS {
        let message = format!("lists {} models; at most {MAX_FALLBACKS}", fallback.len());
        reader.problem(&format!("{path}.fallback"), message);
    }
    for (place, name) in fallback.iter().enumerate() {
        let real = names.aliased(name).unwrap_or(name);
        if name.is_empty() {
            reader.problem(&at(place), "is empty");
        } else if real == model.name && model.targets.iter().all(|target| target.model != *name) {
            let message = format!(
                "`{name}` is this model itself, so that a request could only fail again; name another"
            );
            reader.problem(&at(place), message);
        } else if fallback[..place].contains(name) {
            reader.problem(&at(place), format!("`{name}` is listed twice"));
        }
    }
}
