//! What works and is not as it should be: the start and a reload log it, and `check` prints it.

use super::traces;
use crate::config::Config;

/// One line each: keys that are not used, tenants that share caches, environment variables that cannot be used.
pub fn of(config: &Config) -> Vec<String> {
    let mut warnings = config.source.warnings().to_vec();
    warnings.extend(shared_caches(config));
    warnings.extend(traces::warnings(config));
    warnings
}

fn shared_caches(config: &Config) -> Option<String> {
    let tenants = config.salted_tenants();
    let unsalted = tenants.iter().filter(|tenant| tenant.cache_salt.is_empty());
    // One without a salt shares with nobody.
    let sharing = unsalted.count();
    (sharing > 1).then(|| {
        format!(
            "{sharing} tenants share prefix caches: one can find out by time, usage and the decision header what \
             another has asked; set tenant_salt_key, or the tenants' cache_salt"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_before_and_tenants_that_share_caches_are_in_one_list() {
        let text = "workers: ['http://a:1']\nrouting: {prefill_weight: 4}\n\
                    tenants: [{name: a, keys: [aaaaaaaaaaaaaaaa]}, {name: b, keys: [bbbbbbbbbbbbbbbb]}]\n";
        let warnings = of(&Config::parse("c.yaml", text).unwrap());
        let has = |part: &str| warnings.iter().any(|warning| warning.contains(part));
        assert!(has("c.yaml:2:11: routing.prefill_weight"), "{warnings:?}");
        assert!(has("2 tenants share prefix caches"), "{warnings:?}");
    }

    #[test]
    fn one_tenant_without_a_salt_shares_its_cache_with_nobody() {
        let text = "workers: ['http://a:1']\n\
                    tenants: [{name: a, keys: [aaaaaaaaaaaaaaaa]}, {name: b, keys: [bbbbbbbbbbbbbbbb], cache_salt: s}]\n";
        assert_eq!(shared_caches(&Config::parse("c.yaml", text).unwrap()), None);
    }
}
