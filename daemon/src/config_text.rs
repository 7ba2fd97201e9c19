//! What each configuration key means, and the file that shows them all.
use std::fmt::Write as _;

use crate::config::Config;

/// A key, what it means, and an example for a key that has no default.
pub(crate) struct Key {
    name: &'static str,
    meaning: &'static str,
    example: &'static str,
}

const fn key(name: &'static str, meaning: &'static str) -> Key {
    Key {
        name,
        meaning,
        example: "",
    }
}

const fn optional(name: &'static str, meaning: &'static str, example: &'static str) -> Key {
    Key { name, meaning, example }
}

/// Every key, in the order in which it is shown.
pub(crate) const KEYS: &[Key] = &[
    key(
        "mode",
        "Mode of a request that names none: read-only, workspace-write or danger-full-access.",
    ),
    key(
        "maxMode",
        "Widest mode a request can get. A wider request runs in this one and its result says so.",
    ),
    key(
        "network",
        "What commands may reach: full, loopback or none. A request can only narrow it.",
    ),
    key("tmp", "Which /tmp commands see: shared (the host's) or private."),
    key("writable", "More folders that workspace-write opens for writing."),
    optional(
        "writableBounds",
        "When set, workspaces and extra roots must lie below one of these.",
        "[\"~/src\"]",
    ),
    key(
        "protect",
        "Paths inside writable folders that stay as they are; relative ones are below the workspace.",
    ),
    key(
        "protectGit",
        "Git metadata that a later git on the host would execute or trust stays as it is.",
    ),
    key("denyRead", "Paths that no command can read."),
    key(
        "denyReadDefaults",
        "Adds the places where credentials usually are (~/.ssh, ~/.aws, ~/.config/gh, ...) to denyRead.",
    ),
    key(
        "allowUnixSocket",
        "Unix sockets of the host that commands may reach although the tier would close them.",
    ),
    key(
        "require",
        "Guarantees without which nothing runs (`dsh-exec doctor` lists what this host can give).",
    ),
    key("tiers", "Which mechanisms may enforce, best first."),
    optional(
        "workdir",
        "Working directory when neither the request nor its session has one.",
        "\"~/src\"",
    ),
    key("timeoutMs", "Time limit of a request that names none, in milliseconds."),
    key("maxTimeoutMs", "Longest time limit; a longer one is cut to it."),
    key(
        "keptBytes",
        "Bytes of each stream that are kept in the result: its tail.",
    ),
    key("maxKeptBytes", "Most that one request can raise that to."),
    key(
        "spillBytes",
        "Largest file for the whole of one stream. A longer stream is counted but not offered.",
    ),
    key("spillMaxAgeHours", "Such files are removed after so many hours."),
    key(
        "spillMaxTotalBytes",
        "The oldest are removed when all together are larger.",
    ),
    key(
        "killGraceMs",
        "Time between SIGTERM and SIGKILL when a command is ended, in milliseconds.",
    ),
    key(
        "drainGraceMs",
        "How long descendants may outlive the shell before they are killed, in milliseconds.",
    ),
    key(
        "setupDeadlineMs",
        "The set-up of the confinement fails when it takes longer, in milliseconds.",
    ),
    key(
        "maxDenials",
        "Most distinct refusals kept per command; more are counted.",
    ),
    key(
        "maxConcurrent",
        "Commands that run at once; more wait their turn. Read at start.",
    ),
    key("maxTasks", "Background tasks that run at once; one more is refused."),
    key(
        "keptTasks",
        "Background tasks that have ended and can still be read; the oldest go first.",
    ),
    key(
        "keptTaskHours",
        "Tasks that ended longer ago are forgotten with their output.",
    ),
    key("maxConnections", "Clients that are connected at once."),
    key("helpers", "Helper processes that wait ready, to hide their start-up."),
    key(
        "environmentKeep",
        "Names that stay in a command's environment although a rule would remove them.",
    ),
    key(
        "environmentRemove",
        "More words: a name that contains one, in any letter case, is removed.",
    ),
    optional(
        "helper",
        "The helper's executable. Default: beside dsh-execd. Read at start.",
        "\"/usr/libexec/dsh-exec-helper\"",
    ),
    optional(
        "shell",
        "The bash that runs commands. Default: /bin/bash, /usr/bin/bash, then the daemon's PATH.",
        "\"/bin/bash\"",
    ),
    key(
        "idleExitMs",
        "A daemon that a client started leaves when nobody has been connected for so long; 0 means never. Read at start.",
    ),
    key("logLevel", "off, error, warn, info, debug or trace."),
];

/// The configuration as a file with comments.
pub(crate) fn render(config: &Config) -> String {
    let values = toml::Table::try_from(config).unwrap_or_default();
    let mut text = String::from(
        "# Configuration of dsh-execd. Every key is shown; a missing key has the value shown by default.\n",
    );
    for key in KEYS {
        // Writing to a String cannot fail.
        let _ = match values.get(key.name) {
            Some(value) => write!(text, "\n# {}\n{} = {value}\n", key.meaning, key.name),
            None => write!(text, "\n# {}\n# {} = {}\n", key.meaning, key.name, key.example),
        };
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_key_is_described_and_every_description_has_a_key() {
        let full = Config {
            writable_bounds: Some(vec![]),
            workdir: Some("/w".into()),
            helper: Some("/h".into()),
            shell: Some("/s".into()),
            ..Config::default()
        };
        let mut known: Vec<String> = toml::Table::try_from(&full).unwrap().keys().cloned().collect();
        let mut described: Vec<String> = KEYS.iter().map(|key| key.name.to_owned()).collect();
        known.sort();
        described.sort();
        assert_eq!(known, described);
    }

    #[test]
    fn the_example_of_every_key_without_a_default_is_valid() {
        let text = render(&Config::default());
        let uncommented: String = text
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(rest) if KEYS.iter().any(|key| rest.starts_with(&format!("{} = ", key.name))) => {
                    format!("{rest}\n")
                }
                _ => format!("{line}\n"),
            })
            .collect();
        let config = Config::parse(&uncommented, Path::new("x")).unwrap();
        assert!(
            config.helper.is_some()
                && config.shell.is_some()
                && config.workdir.is_some()
                && config.writable_bounds.is_some()
        );
    }
}
