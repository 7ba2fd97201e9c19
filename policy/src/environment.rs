//! The command's environment: contract section 3, in its five steps.
use crate::bytes::ByteString;
use crate::error::ExecError;
use crate::request::EnvMap;

/// Which names and values are taken out, with the deployment's own additions.
#[derive(Clone, Debug, Default)]
pub struct EnvironmentRules {
    /// Names that are kept although a rule matches, exact.
    pub keep: Vec<String>,
    /// Further words: a name that contains one, in any letter case, is removed.
    pub remove: Vec<String>,
}

/// A command's environment and what was left out of it.
#[derive(Clone, PartialEq, Eq)]
pub struct ChildEnvironment {
    /// What the command gets.
    pub variables: EnvMap,
    /// Names that were removed, sorted, without values.
    pub removed: Vec<ByteString>,
}

/// Steps 1 and 2: takes secrets, shell hooks, credential pointers and inherited `DSH_*` names out of `ambient`.
#[must_use]
pub fn scrub(ambient: &EnvMap, rules: &EnvironmentRules) -> ChildEnvironment {
    let _ = (ambient, rules);
    todo!()
}

/// All five steps. `defaults` are values of the executor itself (`TMPDIR`), set after the terminal defaults and before `env`.
///
/// # Errors
/// `INVALID_REQUEST` when `env` has a `DSH_*` name, `dshEnv` has another one, or a name is empty or has `=` or a NUL byte, or a value a NUL byte.
pub fn build(
    ambient: &EnvMap,
    defaults: &EnvMap,
    env: Option<&EnvMap>,
    dsh_env: Option<&EnvMap>,
    rules: &EnvironmentRules,
) -> Result<ChildEnvironment, ExecError> {
    let _ = (ambient, defaults, env, dsh_env, rules);
    todo!()
}
