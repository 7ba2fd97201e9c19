//! The command's environment: contract section 3, in its five steps.
//!
//! What step 1 removes, and where it is decided (letter case never matters, for names):
//!
//! | group | examples | where |
//! |---|---|---|
//! | secrets by name | `*KEY*`, `*TOKEN*`, `*SECRET*`, `*PASSWORD*`, `DB_PASS`, `MYSQL_PWD`, `*AUTH*` but not `GIT_AUTHOR_*` | `secret_name.rs` |
//! | pointers to credentials | `KUBECONFIG`, `NETRC`, `*ASKPASS*`, `XAUTHORITY`, `KRB5CCNAME`, `SSH_AUTH_SOCK` | `secret_name.rs` |
//! | secrets by value | private-key blocks, forge and cloud tokens, URLs and connection strings with a password, `Authorization` headers | `secret_value.rs` |
//! | what bash itself obeys | `BASH_ENV`, `ENV`, `SHELLOPTS`, `BASH_FUNC_*`, `PROMPT_COMMAND`, `PS4`, `CDPATH`, `IFS`, any exported function | `shell_hook.rs` |
//! | what the loader, git, make and interpreters run first | `LD_PRELOAD`, `GIT_CONFIG_*`, `GIT_SSH_COMMAND`, `PERL5OPT`, `NODE_OPTIONS` with `--require` | `shell_hook.rs` |
//! | what belongs to the parent process | `GIT_DIR`, `LISTEN_FDS`, `NOTIFY_SOCKET`, a make job server | `shell_hook.rs` |
//!
//! What stays although it selects code: `PATH`, `LD_LIBRARY_PATH`, `PYTHONPATH`, `PERL5LIB`, `RUBYLIB`, `EDITOR`. They say *where* programs and libraries are,
//! tools break without them, and a confined command can set them itself anyway.
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::bytes::ByteString;
use crate::error::{ErrorCode, ExecError};
use crate::request::EnvMap;
use crate::{secret_name, secret_value, shell_hook};

/// Longest string, with its final NUL byte, that the kernel accepts as one argument or one environment entry (`MAX_ARG_STRLEN`).
pub const KERNEL_STRING_LIMIT: usize = 131_072;

/// Step 3: output is read by programs, not shown on a terminal.
const TERMINAL_DEFAULTS: [(&str, &str); 4] = [
    ("NO_COLOR", "1"),
    ("TERM", "dumb"),
    ("PAGER", "cat"),
    ("GIT_PAGER", "cat"),
];

/// Which names and values are taken out, with the deployment's own additions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, rename_all = "camelCase")]
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

/// Names only: a value may be one of the deliberate credentials of `env`.
impl std::fmt::Debug for ChildEnvironment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChildEnvironment")
            .field("names", &self.variables.keys().collect::<Vec<_>>())
            .field("removed", &self.removed)
            .finish()
    }
}

/// Steps 1 and 2: takes secrets, shell hooks, credential pointers and inherited `DSH_*` names out of `ambient`.
#[must_use]
pub fn scrub(ambient: &EnvMap, rules: &EnvironmentRules) -> ChildEnvironment {
    let words: Vec<Vec<u8>> = rules
        .remove
        .iter()
        .filter(|word| !word.is_empty())
        .map(|word| word.to_ascii_uppercase().into_bytes())
        .collect();
    let (mut variables, mut removed) = (EnvMap::new(), Vec::new());
    for (name, value) in ambient {
        if is_kept(name.as_bytes(), value.as_bytes(), &words, rules) {
            variables.insert(name.clone(), value.clone());
        } else if !name.0.is_empty() {
            removed.push(name.clone());
        }
    }
    ChildEnvironment { variables, removed }
}

/// All five steps. `defaults` are values of the executor itself (`TMPDIR`), set after the terminal defaults and before `env`.
///
/// A name that was removed but is set again on purpose does not count as removed.
///
/// # Errors
/// `INVALID_REQUEST` when `env` has a `DSH_*` name, `dshEnv` has another one, or a name is empty or has `=` or a NUL byte, or a value a NUL byte;
/// `LIMIT_EXCEEDED` when an entry is longer than the kernel accepts.
pub fn build(
    ambient: &EnvMap,
    defaults: &EnvMap,
    env: Option<&EnvMap>,
    dsh_env: Option<&EnvMap>,
    rules: &EnvironmentRules,
) -> Result<ChildEnvironment, ExecError> {
    let ChildEnvironment { mut variables, removed } = scrub(ambient, rules);
    variables.extend(TERMINAL_DEFAULTS.map(|(name, value)| (name.into(), value.into())));
    variables.extend(defaults.clone());
    for (name, value) in env.into_iter().flatten() {
        check_entry("env", name, value)?;
        if is_managed(name.as_bytes()) {
            return Err(invalid(format!(
                "invalid env: {} is a managed name; names that start with DSH_ are set through dshEnv",
                name.display()
            )));
        }
        variables.insert(name.clone(), value.clone());
    }
    for (name, value) in dsh_env.into_iter().flatten() {
        check_entry("dshEnv", name, value)?;
        if !name.as_bytes().starts_with(b"DSH_") {
            return Err(invalid(format!(
                "invalid dshEnv: {} does not start with DSH_",
                name.display()
            )));
        }
        variables.insert(name.clone(), value.clone());
    }
    check_lengths(&variables)?;
    let removed = removed
        .into_iter()
        .filter(|name| !variables.contains_key(name))
        .collect::<BTreeSet<_>>();
    Ok(ChildEnvironment {
        variables,
        removed: removed.into_iter().collect(),
    })
}

/// Whether an inherited entry passes steps 1 and 2.
fn is_kept(name: &[u8], value: &[u8], words: &[Vec<u8>], rules: &EnvironmentRules) -> bool {
    if is_managed(name) || !is_possible_name(name) || value.contains(&0) {
        return false;
    }
    if rules.keep.iter().any(|kept| kept.as_bytes() == name) {
        return true;
    }
    let upper = name.to_ascii_uppercase();
    !(secret_name::is_secret(&upper)
        || shell_hook::is_hook(&upper, value)
        || words.iter().any(|word| contains(&upper, word))
        || secret_value::is_secret(&upper, value))
}

/// Names of an outer or our own harness, in any letter case.
fn is_managed(name: &[u8]) -> bool {
    name.get(..4).is_some_and(|prefix| prefix.eq_ignore_ascii_case(b"DSH_"))
}

fn is_possible_name(name: &[u8]) -> bool {
    !name.is_empty() && !name.contains(&b'=') && !name.contains(&0)
}

fn check_entry(field: &str, name: &ByteString, value: &ByteString) -> Result<(), ExecError> {
    if name.0.is_empty() {
        return Err(invalid(format!("invalid {field}: a name is empty")));
    }
    if !is_possible_name(name.as_bytes()) {
        let shown = name.as_bytes().escape_ascii();
        return Err(invalid(format!(
            "invalid {field}: the name {shown} has `=` or a NUL byte"
        )));
    }
    if value.as_bytes().contains(&0) {
        return Err(invalid(format!(
            "invalid {field}: the value of {} has a NUL byte",
            name.display()
        )));
    }
    Ok(())
}

fn check_lengths(variables: &EnvMap) -> Result<(), ExecError> {
    for (name, value) in variables {
        let length = name.0.len() + value.0.len() + 2; // `=` and the final NUL
        if length > KERNEL_STRING_LIMIT {
            return Err(ExecError::new(
                ErrorCode::LimitExceeded,
                format!(
                    "the environment entry {} takes {length} bytes, the kernel accepts at most {KERNEL_STRING_LIMIT}; pass it by standard input or in a file",
                    name.display()
                ),
            ));
        }
    }
    Ok(())
}

fn invalid(message: String) -> ExecError {
    ExecError::new(ErrorCode::InvalidRequest, message)
}

/// Whether `needle`, not empty, is somewhere in `haystack`. By its first bytes: this runs a hundred times for each command.
pub(crate) fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    let Some((first, rest)) = needle.split_first() else {
        return false;
    };
    let mut after = haystack;
    while let Some(position) = after.iter().position(|byte| byte == first) {
        after = &after[position + 1..];
        if rest.first().is_none_or(|second| after.first() == Some(second)) && after.starts_with(rest) {
            return true;
        }
    }
    false
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn map(entries: &[(&str, &str)]) -> EnvMap {
        entries
            .iter()
            .map(|(name, value)| ((*name).into(), (*value).into()))
            .collect()
    }

    fn names(list: &[ByteString]) -> Vec<String> {
        list.iter().map(ByteString::display).collect()
    }

    fn build_error(env: Option<&EnvMap>, dsh_env: Option<&EnvMap>) -> ExecError {
        build(
            &EnvMap::new(),
            &EnvMap::new(),
            env,
            dsh_env,
            &EnvironmentRules::default(),
        )
        .unwrap_err()
    }

    #[test]
    fn the_five_steps_in_their_order() {
        let ambient = map(&[
            ("PATH", "/bin"),
            ("TERM", "xterm"),
            ("DSH_SHELL", "9"),
            ("dsh_x", "1"),
            ("A_TOKEN", "t"),
        ]);
        let built = build(
            &ambient,
            &map(&[("TMPDIR", "/tmp/p")]),
            Some(&map(&[("PAGER", "less"), ("B_TOKEN", "on purpose"), ("TMPDIR", "/w")])),
            Some(&map(&[("DSH_SHELL", "1")])),
            &EnvironmentRules::default(),
        )
        .unwrap();
        let expected = map(&[
            ("PATH", "/bin"),
            ("NO_COLOR", "1"),
            ("TERM", "dumb"),
            ("GIT_PAGER", "cat"),
            ("PAGER", "less"),
            ("B_TOKEN", "on purpose"),
            ("TMPDIR", "/w"),
            ("DSH_SHELL", "1"),
        ]);
        assert_eq!(built.variables, expected);
        assert_eq!(names(&built.removed), ["A_TOKEN", "dsh_x"]);
        let shown = format!("{built:?}");
        assert!(shown.contains("B_TOKEN") && !shown.contains("on purpose"), "{shown}");
    }

    #[test]
    fn a_removed_name_that_is_set_again_on_purpose_is_there_and_not_listed() {
        let secret = map(&[("A_TOKEN", "old")]);
        let again = map(&[("A_TOKEN", "new")]);
        let built = build(
            &secret,
            &EnvMap::new(),
            Some(&again),
            None,
            &EnvironmentRules::default(),
        )
        .unwrap();
        assert_eq!(built.variables[&"A_TOKEN".into()], "new".into());
        assert!(built.removed.is_empty());
    }

    #[test]
    fn keep_and_remove_are_the_deployment_s_and_never_free_a_managed_name() {
        let rules = EnvironmentRules {
            keep: vec!["KEYBOARD".into(), "DSH_HOME".into()],
            remove: vec!["corp".into(), String::new()],
        };
        let scrubbed = scrub(
            &map(&[
                ("KEYBOARD", "de"),
                ("KEYBOARD2", "de"),
                ("MyCorpId", "1"),
                ("DSH_HOME", "/"),
                ("A", "b"),
            ]),
            &rules,
        );
        assert_eq!(scrubbed.variables, map(&[("KEYBOARD", "de"), ("A", "b")]));
        assert_eq!(names(&scrubbed.removed), ["DSH_HOME", "KEYBOARD2", "MyCorpId"]);
    }

    #[test]
    fn a_needle_is_found_wherever_it_is_and_however_short() {
        for needle in [&b"a"[..], b"ab", b"abc"] {
            assert!(contains(b"abc", needle) && contains(b"xaabcx", needle) && contains(b"xxabc", needle));
            assert!(!contains(b"", needle) && !contains(b"bcbc", needle));
        }
        assert!(!contains(b"ab", b"abc"));
    }

    #[test]
    fn bytes_that_are_not_text_are_judged_and_kept_like_any_other() {
        let mut ambient = EnvMap::new();
        ambient.insert(b"L\xff"[..].into(), b"\xfe/bin"[..].into());
        ambient.insert(b"\xffToKeN"[..].into(), b"x"[..].into());
        ambient.insert("V".into(), b"\xff ghp_0123456789abcdefghij0123456789abcdef"[..].into());
        let scrubbed = scrub(&ambient, &EnvironmentRules::default());
        assert_eq!(
            scrubbed.variables.keys().collect::<Vec<_>>(),
            [&ByteString::from(&b"L\xff"[..])]
        );
        assert_eq!(scrubbed.removed.len(), 2);
    }

    #[test]
    fn every_wrong_entry_is_refused_by_its_name_and_never_shows_its_value() {
        for (env, dsh_env, message) in [
            (
                Some(map(&[("dsh_A", "v")])),
                None,
                "invalid env: dsh_A is a managed name; names that start with DSH_ are set through dshEnv",
            ),
            (
                None,
                Some(map(&[("PATH", "v")])),
                "invalid dshEnv: PATH does not start with DSH_",
            ),
            (
                None,
                Some(map(&[("dsh_a", "v")])),
                "invalid dshEnv: dsh_a does not start with DSH_",
            ),
            (Some(map(&[("", "v")])), None, "invalid env: a name is empty"),
            (
                Some(map(&[("A=B", "v")])),
                None,
                "invalid env: the name A=B has `=` or a NUL byte",
            ),
            (
                Some(map(&[("A\0", "v")])),
                None,
                "invalid env: the name A\\x00 has `=` or a NUL byte",
            ),
            (
                Some(map(&[("A", "v\0")])),
                None,
                "invalid env: the value of A has a NUL byte",
            ),
        ] {
            let error = build_error(env.as_ref(), dsh_env.as_ref());
            assert_eq!(
                (error.code, error.message.as_str()),
                (ErrorCode::InvalidRequest, message)
            );
        }
    }

    #[test]
    fn an_entry_is_as_long_as_the_kernel_takes_and_not_longer() {
        let fits = map(&[("A", &"x".repeat(KERNEL_STRING_LIMIT - 3))]);
        assert!(
            build(
                &EnvMap::new(),
                &EnvMap::new(),
                Some(&fits),
                None,
                &EnvironmentRules::default()
            )
            .is_ok()
        );
        let error = build_error(Some(&map(&[("A", &"x".repeat(KERNEL_STRING_LIMIT - 2))])), None);
        assert_eq!(error.code, ErrorCode::LimitExceeded);
        assert!(
            error
                .message
                .starts_with("the environment entry A takes 131073 bytes, the kernel accepts at most 131072")
        );
    }
}
