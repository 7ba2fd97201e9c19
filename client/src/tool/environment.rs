//! Who sets which `DSH_*` variable of a command: a registry of contributors, each with the keys that it declares. A key has one owner; whatever is
//! wrong about a contributor fails loudly and with its name.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dsh_policy::ByteString;
use dsh_policy::request::EnvMap;

/// What a contributor may know about the call that it resolves its values for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallContext {
    /// The session of the call.
    pub session: Option<String>,
    /// Where that session keeps its log.
    pub session_log: Option<PathBuf>,
}

/// A key and what it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyDescription {
    /// The variable.
    pub key: String,
    /// For people and models.
    pub description: String,
    /// Who sets it.
    pub owner: String,
}

/// Why a variable cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// Two contributors want one key.
    #[error("environment contributor \"{contributor}\" declares {key}, which \"{owner}\" owns already")]
    Taken {
        /// The key.
        key: String,
        /// Who has it.
        owner: String,
        /// Who wants it.
        contributor: String,
    },
    /// The key is one of the built-in ones.
    #[error("environment contributor \"{contributor}\" declares {key}, which is reserved")]
    Reserved {
        /// The key.
        key: String,
        /// Who wants it.
        contributor: String,
    },
    /// The key is not in the name space of managed variables.
    #[error("environment contributor \"{contributor}\" declares {key}, which does not start with DSH_")]
    Prefix {
        /// The key.
        key: String,
        /// Who wants it.
        contributor: String,
    },
    /// A value came for a key that was never declared.
    #[error("environment contributor \"{contributor}\" returned {key}, which it has not declared")]
    Undeclared {
        /// The key.
        key: String,
        /// Who returned it.
        contributor: String,
    },
    /// The key is no name of a variable.
    #[error(
        "environment contributor \"{contributor}\" declares {key}, which is not DSH_ and then letters, digits or underscores"
    )]
    Syntax {
        /// The key.
        key: String,
        /// Who wants it.
        contributor: String,
    },
    /// No environment can hold the value.
    #[error("environment contributor \"{contributor}\" returned a value with a NUL byte for {key}")]
    Value {
        /// The key.
        key: String,
        /// Who returned it.
        contributor: String,
    },
    /// It has no values for this call, though it should have.
    #[error("environment contributor \"{contributor}\" failed: {reason}")]
    Failed {
        /// Who.
        contributor: String,
        /// Its own words.
        reason: String,
    },
    /// The name is in use.
    #[error("an environment contributor called \"{0}\" is registered already")]
    Name(String),
}

/// Gives values for one call, or says why it cannot; then the command does not run.
pub type Resolve = dyn Fn(&CallContext) -> Result<BTreeMap<String, String>, String> + Send + Sync;

/// Somebody who sets variables.
pub struct Contributor {
    /// Stable, for errors and lists.
    pub name: String,
    /// Keys with their descriptions.
    pub keys: Vec<(String, String)>,
    /// Called once for each execution.
    pub resolve: Box<Resolve>,
}

impl std::fmt::Debug for Contributor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contributor")
            .field("name", &self.name)
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}

const PREFIX: &str = "DSH_";
const BUILT_IN: &str = "built-in";
/// What every command gets, as far as the call has it.
const RESERVED: [(&str, &str); 4] = [
    ("DSH_HOME", "folder in which the harness keeps its state"),
    ("DSH_SHELL", "1 in every command of the harness"),
    ("DSH_SESSION_ID", "session of the call"),
    ("DSH_SESSION_JSONL", "log of the session"),
];

/// All contributors. Clones are the same registry.
#[derive(Clone, Debug)]
pub struct EnvironmentRegistry {
    home: PathBuf,
    contributors: Arc<Mutex<Vec<Arc<Contributor>>>>,
}

/// A contributor's place in the registry; dropped, the place is free again.
#[derive(Debug)]
#[must_use = "a registration ends when its handle is dropped"]
pub struct Registration {
    contributors: Arc<Mutex<Vec<Arc<Contributor>>>>,
    contributor: Arc<Contributor>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        locked(&self.contributors).retain(|other| !Arc::ptr_eq(other, &self.contributor));
    }
}

fn locked(contributors: &Mutex<Vec<Arc<Contributor>>>) -> MutexGuard<'_, Vec<Arc<Contributor>>> {
    // Nothing in here is left half done by a panic.
    contributors.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EnvironmentRegistry {
    /// `configured` is the home of the harness; without it the ambient `DSH_HOME` counts, then `~/.dsh`. Always absolute.
    #[must_use]
    pub fn new(configured: Option<&Path>) -> Self {
        let ambient = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let home = configured.map(Path::to_owned).or_else(|| ambient("DSH_HOME"));
        let home = home.unwrap_or_else(|| ambient("HOME").unwrap_or_else(|| PathBuf::from("/")).join(".dsh"));
        Self {
            home: std::path::absolute(&home).unwrap_or(home),
            contributors: Arc::default(),
        }
    }

    /// Adds a contributor for as long as the registration lives.
    ///
    /// # Errors
    /// A name or key that cannot be had.
    pub fn register(&self, contributor: Contributor) -> Result<Registration, EnvironmentError> {
        let mut contributors = locked(&self.contributors);
        if contributors.iter().any(|other| other.name == contributor.name) || contributor.name == BUILT_IN {
            return Err(EnvironmentError::Name(contributor.name));
        }
        for (key, _) in &contributor.keys {
            let (key, contributor) = (key.clone(), contributor.name.clone());
            if !key.starts_with(PREFIX) {
                return Err(EnvironmentError::Prefix { key, contributor });
            }
            if !key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') || key == PREFIX {
                return Err(EnvironmentError::Syntax { key, contributor });
            }
            if RESERVED.iter().any(|(reserved, _)| *reserved == key) {
                return Err(EnvironmentError::Reserved { key, contributor });
            }
            let owner = contributors
                .iter()
                .find(|other| other.keys.iter().any(|(owned, _)| *owned == key));
            if let Some(owner) = owner {
                let owner = owner.name.clone();
                return Err(EnvironmentError::Taken {
                    key,
                    owner,
                    contributor,
                });
            }
        }
        let contributor = Arc::new(contributor);
        contributors.push(Arc::clone(&contributor));
        Ok(Registration {
            contributors: Arc::clone(&self.contributors),
            contributor,
        })
    }

    /// Every key, the built-in ones first. Runs nothing.
    #[must_use]
    pub fn list(&self) -> Vec<KeyDescription> {
        let built_in = RESERVED.iter().map(|(key, description)| (BUILT_IN, *key, *description));
        let contributors = locked(&self.contributors);
        let others = contributors.iter().flat_map(|contributor| {
            let keys = contributor.keys.iter();
            keys.map(|(key, description)| (contributor.name.as_str(), key.as_str(), description.as_str()))
        });
        built_in
            .chain(others)
            .map(|(owner, key, description)| KeyDescription {
                key: key.to_owned(),
                description: description.to_owned(),
                owner: owner.to_owned(),
            })
            .collect()
    }

    /// The variables of one call.
    ///
    /// # Errors
    /// A contributor that fails, or returns what it has not declared. Then there are none: a command must not run with half of them.
    pub fn resolve(&self, context: &CallContext) -> Result<EnvMap, EnvironmentError> {
        // The lock is not held while they run: one may look at the registry itself.
        let contributors: Vec<_> = locked(&self.contributors).clone();
        let mut variables = self.built_in(context);
        for contributor in contributors {
            let name = || contributor.name.clone();
            let values = (contributor.resolve)(context).map_err(|reason| EnvironmentError::Failed {
                contributor: name(),
                reason,
            })?;
            for (key, value) in values {
                let contributor_name = name();
                if !contributor.keys.iter().any(|(declared, _)| *declared == key) {
                    return Err(EnvironmentError::Undeclared {
                        key,
                        contributor: contributor_name,
                    });
                }
                if value.contains('\0') {
                    return Err(EnvironmentError::Value {
                        key,
                        contributor: contributor_name,
                    });
                }
                variables.insert(key.into(), value.into());
            }
        }
        Ok(variables)
    }

    fn built_in(&self, context: &CallContext) -> EnvMap {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let values: [Option<ByteString>; 4] = [
            Some(self.home.as_path().into()),
            Some("1".into()),
            context.session.as_deref().map(Into::into),
            context.session_log.as_ref().map(|log| absolute(log).into()),
        ];
        let pairs = RESERVED.iter().zip(values);
        pairs
            .filter_map(|((key, _), value)| Some(((*key).into(), value?)))
            .collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn resolved(registry: &EnvironmentRegistry, call: &CallContext) -> BTreeMap<String, String> {
        let all = registry.resolve(call).unwrap();
        all.iter()
            .map(|(key, value)| (key.display(), value.display()))
            .collect()
    }

    fn contributor(name: &str, declares: &[&str], returns: &[(&str, &str)]) -> Contributor {
        let values: BTreeMap<String, String> = returns
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        Contributor {
            name: name.into(),
            keys: declares
                .iter()
                .map(|key| ((*key).to_owned(), "text".to_owned()))
                .collect(),
            resolve: Box::new(move |_| Ok(values.clone())),
        }
    }

    #[test]
    fn a_key_has_one_owner_for_as_long_as_its_handle_lives() {
        let registry = EnvironmentRegistry::new(Some(Path::new("/home/h")));
        let first = registry
            .register(contributor("one", &["DSH_A"], &[("DSH_A", "1")]))
            .unwrap();
        let taken = registry.register(contributor("two", &["DSH_A"], &[])).unwrap_err();
        assert_eq!(
            taken.to_string(),
            "environment contributor \"two\" declares DSH_A, which \"one\" owns already"
        );
        assert_eq!(resolved(&registry, &CallContext::default())["DSH_A"], "1");
        assert!(
            registry
                .list()
                .iter()
                .any(|key| key.key == "DSH_A" && key.owner == "one")
        );
        drop(first);
        assert!(!resolved(&registry, &CallContext::default()).contains_key("DSH_A"));
        let _second = registry.register(contributor("two", &["DSH_A"], &[])).unwrap();
    }

    #[test]
    fn what_is_wrong_names_the_contributor() {
        let registry = EnvironmentRegistry::new(None);
        for (declares, message) in [
            (
                "DSH_HOME",
                "environment contributor \"x\" declares DSH_HOME, which is reserved",
            ),
            (
                "HOME",
                "environment contributor \"x\" declares HOME, which does not start with DSH_",
            ),
        ] {
            let error = registry.register(contributor("x", &[declares], &[])).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
        let _liar = registry
            .register(contributor("liar", &["DSH_B"], &[("DSH_C", "1")]))
            .unwrap();
        assert_eq!(
            registry.resolve(&CallContext::default()).unwrap_err().to_string(),
            "environment contributor \"liar\" returned DSH_C, which it has not declared"
        );
        assert_eq!(
            registry.register(contributor("liar", &[], &[])).unwrap_err(),
            EnvironmentError::Name("liar".into())
        );
    }

    #[test]
    fn built_in_values_are_there_when_the_call_has_them() {
        let registry = EnvironmentRegistry::new(Some(Path::new("/home/h")));
        let none = resolved(&registry, &CallContext::default());
        assert_eq!(none.keys().collect::<Vec<_>>(), ["DSH_HOME", "DSH_SHELL"]);
        let call = CallContext {
            session: Some("s1".into()),
            session_log: Some("/logs/s1.jsonl".into()),
        };
        let all = resolved(&registry, &call);
        assert_eq!(
            all.into_iter().collect::<Vec<_>>(),
            [
                ("DSH_HOME", "/home/h"),
                ("DSH_SESSION_ID", "s1"),
                ("DSH_SESSION_JSONL", "/logs/s1.jsonl"),
                ("DSH_SHELL", "1")
            ]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
        );
    }
}
