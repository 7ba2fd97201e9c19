//! The configuration: every key, its default, how a file is read, and how the whole is shown.
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use dsh_policy::mode::{Guarantee, Network, SandboxMode, Tier, TmpKind};
use dsh_policy::policy::Deployment;
use serde::{Deserialize, Serialize};

use crate::config_text;

/// Why a configuration cannot be used, with the place.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {source}", file = file.display())]
    Unreadable {
        /// Which file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something in it is wrong.
    #[error("{file}:{line}: {message}", file = file.display())]
    Invalid {
        /// Which file.
        file: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong and what is right.
        message: String,
    },
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // the names say it
pub enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Everything that an operator can set. The meaning of each key is in [`config_text::KEYS`], where the shown file takes it from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[allow(missing_docs)] // one description per key, in KEYS; a test keeps the two lists equal
pub struct Config {
    pub mode: SandboxMode,
    pub max_mode: SandboxMode,
    pub network: Network,
    pub tmp: TmpKind,
    pub writable: Vec<PathBuf>,
    pub writable_bounds: Option<Vec<PathBuf>>,
    pub protect: Vec<PathBuf>,
    pub protect_git: bool,
    pub deny_read: Vec<PathBuf>,
    pub deny_read_defaults: bool,
    pub allow_unix_socket: Vec<PathBuf>,
    pub require: Vec<Guarantee>,
    pub tiers: Vec<Tier>,
    pub workdir: Option<PathBuf>,
    pub timeout_ms: u64,
    pub max_timeout_ms: u64,
    pub kept_bytes: u64,
    pub max_kept_bytes: u64,
    pub spill_bytes: u64,
    pub spill_max_age_hours: u64,
    pub spill_max_total_bytes: u64,
    pub kill_grace_ms: u64,
    pub drain_grace_ms: u64,
    pub setup_deadline_ms: u64,
    pub max_denials: u32,
    pub max_concurrent: usize,
    pub max_tasks: usize,
    pub kept_tasks: usize,
    pub kept_task_hours: u64,
    pub max_connections: usize,
    pub helpers: usize,
    pub environment_keep: Vec<String>,
    pub environment_remove: Vec<String>,
    pub helper: Option<PathBuf>,
    pub shell: Option<PathBuf>,
    pub idle_exit_ms: u64,
    pub log_level: LogLevel,
}

impl Default for Config {
    fn default() -> Self {
        let deployment = Deployment::default();
        Self {
            mode: deployment.default_mode,
            max_mode: deployment.max_mode,
            network: deployment.network,
            tmp: deployment.tmp,
            writable: Vec::new(),
            writable_bounds: None,
            protect: Vec::new(),
            protect_git: deployment.protect_git,
            deny_read: Vec::new(),
            deny_read_defaults: false,
            allow_unix_socket: Vec::new(),
            require: Vec::new(),
            tiers: Tier::ALL.to_vec(),
            workdir: None,
            timeout_ms: deployment.default_timeout_ms,
            max_timeout_ms: deployment.max_timeout_ms,
            kept_bytes: deployment.kept_bytes,
            max_kept_bytes: deployment.max_kept_bytes,
            spill_bytes: deployment.spill_bytes,
            spill_max_age_hours: 24,
            spill_max_total_bytes: 1024 * 1024 * 1024,
            kill_grace_ms: deployment.kill_grace_ms,
            drain_grace_ms: deployment.drain_grace_ms,
            setup_deadline_ms: 5_000,
            max_denials: deployment.max_denials,
            max_concurrent: 256,
            max_tasks: 64,
            kept_tasks: 100,
            kept_task_hours: 168,
            max_connections: 1_024,
            helpers: 2,
            environment_keep: Vec::new(),
            environment_remove: Vec::new(),
            helper: None,
            shell: None,
            idle_exit_ms: 900_000,
            log_level: LogLevel::Info,
        }
    }
}

/// Where credentials usually are, for `denyReadDefaults`.
const CREDENTIALS: &[&str] = &[
    "~/.ssh",
    "~/.gnupg",
    "~/.aws",
    "~/.azure",
    "~/.kube",
    "~/.docker/config.json",
    "~/.netrc",
    "~/.git-credentials",
    "~/.config/git/credentials",
    "~/.config/gh",
    "~/.config/gcloud",
    "~/.npmrc",
    "~/.pypirc",
    "~/.cargo/credentials.toml",
    "~/.password-store",
    "~/.local/share/keyrings",
    "~/.mozilla",
    "~/.config/chromium",
    "~/.config/google-chrome",
];

impl Config {
    /// Reads a file; a file that does not exist means every default.
    ///
    /// # Errors
    /// [`ConfigError`] with file, line and what to do.
    pub fn load(file: &Path) -> Result<Self, ConfigError> {
        match fs::read_to_string(file) {
            Ok(text) => Self::parse(&text, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(ConfigError::Unreadable {
                file: file.to_owned(),
                source,
            }),
        }
    }

    /// Reads the text of a file; `file` is for messages.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the line.
    pub fn parse(text: &str, file: &Path) -> Result<Self, ConfigError> {
        let invalid = |line, message| ConfigError::Invalid {
            file: file.to_owned(),
            line,
            message,
        };
        let config: Self = toml::from_str(text).map_err(|error| {
            invalid(
                line_of(text, &error.span().unwrap_or_default()),
                error.message().replace('\n', " "),
            )
        })?;
        match config.fault() {
            None => Ok(config),
            Some((key, message)) => Err(invalid(line_of_key(text, key), message)),
        }
    }

    /// What is wrong although each value is well formed: the key, and what would be right.
    fn fault(&self) -> Option<(&'static str, String)> {
        let paths: [(&'static str, &[PathBuf]); 5] = [
            ("writable", &self.writable),
            ("writableBounds", self.writable_bounds.as_deref().unwrap_or_default()),
            ("denyRead", &self.deny_read),
            ("allowUnixSocket", &self.allow_unix_socket),
            ("workdir", self.workdir.as_slice()),
        ];
        for (key, list) in paths {
            if let Some(path) = list.iter().find(|path| !path.is_absolute() && !path.starts_with("~")) {
                return Some((
                    key,
                    format!(
                        "`{key}` has the relative path `{}`; write it from `/` or from `~/`",
                        path.display()
                    ),
                ));
            }
        }
        for (key, path) in [("helper", &self.helper), ("shell", &self.shell)] {
            if path.as_ref().is_some_and(|path| !path.is_absolute()) {
                return Some((key, format!("`{key}` must be an absolute path")));
            }
        }
        if self.mode.is_strictly_wider_than(self.max_mode) {
            return Some((
                "mode",
                format!(
                    "`mode` is {} but `maxMode` is {}, which is narrower",
                    self.mode, self.max_mode
                ),
            ));
        }
        let positive = [
            ("timeoutMs", self.timeout_ms),
            ("maxTimeoutMs", self.max_timeout_ms),
            ("setupDeadlineMs", self.setup_deadline_ms),
            ("maxConcurrent", self.max_concurrent as u64),
            ("maxTasks", self.max_tasks as u64),
            ("maxConnections", self.max_connections as u64),
        ];
        if let Some((key, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Some((key, format!("`{key}` must be at least 1")));
        }
        if self.timeout_ms > self.max_timeout_ms {
            return Some((
                "timeoutMs",
                format!("`timeoutMs` is over `maxTimeoutMs` ({})", self.max_timeout_ms),
            ));
        }
        if self.kept_bytes > self.max_kept_bytes {
            return Some((
                "keptBytes",
                format!("`keptBytes` is over `maxKeptBytes` ({})", self.max_kept_bytes),
            ));
        }
        if self.max_kept_bytes > dsh_policy::codec::MESSAGE_LIMIT as u64 {
            let limit = dsh_policy::codec::MESSAGE_LIMIT;
            return Some((
                "maxKeptBytes",
                format!("`maxKeptBytes` is over {limit}, the largest message"),
            ));
        }
        if self.helpers > 64 {
            return Some((
                "helpers",
                "`helpers` is over 64; two or three waiting helpers hide their start-up".into(),
            ));
        }
        if self.tiers.is_empty() {
            return Some((
                "tiers",
                "`tiers` is empty: nothing confined could run; leave the key out for all".into(),
            ));
        }
        None
    }

    /// The whole as a file, with every default and what each key means.
    #[must_use]
    pub fn to_toml(&self) -> String {
        config_text::render(self)
    }

    /// What bounds and defaults this sets for requests. `~` becomes `home`.
    #[must_use]
    pub fn deployment(&self, home: Option<&Path>) -> Deployment {
        let expand = |path: &PathBuf| match (path.strip_prefix("~"), home) {
            (Ok(rest), Some(home)) => home.join(rest).into(),
            _ => path.as_path().into(),
        };
        let expand_all = |paths: &[PathBuf]| paths.iter().map(expand).collect::<Vec<_>>();
        let mut deny_read = expand_all(&self.deny_read);
        if self.deny_read_defaults && home.is_some() {
            deny_read.extend(CREDENTIALS.iter().map(|path| expand(&PathBuf::from(path))));
        }
        Deployment {
            default_mode: self.mode,
            max_mode: self.max_mode,
            network: self.network,
            tmp: self.tmp,
            writable: expand_all(&self.writable),
            writable_bounds: self.writable_bounds.as_deref().map(expand_all),
            protect: expand_all(&self.protect),
            protect_git: self.protect_git,
            deny_read,
            allow_unix_socket: expand_all(&self.allow_unix_socket),
            require: self.require.clone(),
            workdir: self.workdir.as_ref().map(expand),
            default_timeout_ms: self.timeout_ms,
            max_timeout_ms: self.max_timeout_ms,
            kept_bytes: self.kept_bytes,
            max_kept_bytes: self.max_kept_bytes,
            spill_bytes: self.spill_bytes,
            kill_grace_ms: self.kill_grace_ms,
            drain_grace_ms: self.drain_grace_ms,
            max_denials: self.max_denials,
        }
    }
}

fn line_of(text: &str, span: &Range<usize>) -> usize {
    text.get(..span.start).unwrap_or_default().matches('\n').count() + 1
}

fn line_of_key(text: &str, key: &str) -> usize {
    let names = |line: &str| {
        line.trim_start()
            .strip_prefix(key)
            .is_some_and(|rest| rest.trim_start().starts_with('='))
    };
    text.lines().position(names).map_or(1, |index| index + 1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        Config::parse(text, Path::new("/c.toml")).unwrap_err().to_string()
    }

    #[test]
    fn what_is_shown_is_what_is_read() {
        let mut config = Config::default();
        assert_eq!(Config::parse(&config.to_toml(), Path::new("x")).unwrap(), config);
        config.writable_bounds = Some(vec!["/a b".into()]);
        config.require = Guarantee::ALL.to_vec();
        config.workdir = Some("~/w".into());
        config.environment_keep = vec!["A\"B".into()];
        config.log_level = LogLevel::Trace;
        assert_eq!(Config::parse(&config.to_toml(), Path::new("x")).unwrap(), config);
    }

    #[test]
    fn a_missing_file_is_all_defaults() {
        assert_eq!(
            Config::load(Path::new("/nonexistent/dsh.toml")).unwrap(),
            Config::default()
        );
    }

    #[test]
    fn errors_name_file_line_and_remedy() {
        let unknown = error_of("mode = \"read-only\"\n\nmoed = 3\n");
        assert!(unknown.starts_with("/c.toml:3: unknown field `moed`"), "{unknown}");
        let value = error_of("\nmode = \"wide\"\n");
        assert!(value.starts_with("/c.toml:2: unknown variant `wide`"), "{value}");
        assert!(value.contains("workspace-write"), "{value}");
        assert_eq!(
            error_of("mode = \"workspace-write\"\nmaxMode = \"read-only\""),
            "/c.toml:1: `mode` is workspace-write but `maxMode` is read-only, which is narrower"
        );
        assert_eq!(
            error_of("# x\nwritable = [\"a\"]"),
            "/c.toml:2: `writable` has the relative path `a`; write it from `/` or from `~/`"
        );
        assert_eq!(
            error_of("\n\ntimeoutMs = 0"),
            "/c.toml:3: `timeoutMs` must be at least 1"
        );
        assert!(error_of("timeoutMs = -1").starts_with("/c.toml:1: "));
        assert!(error_of("mode = ").starts_with("/c.toml:1: "));
    }

    #[test]
    fn home_is_filled_in_and_the_credential_list_is_optional() {
        let mut config = Config {
            deny_read: vec!["~/x".into(), "/y".into()],
            ..Config::default()
        };
        let paths = |config: &Config| config.deployment(Some(Path::new("/h"))).deny_read;
        assert_eq!(paths(&config), ["/h/x".into(), "/y".into()]);
        config.deny_read_defaults = true;
        assert!(paths(&config).contains(&"/h/.ssh".into()));
        assert_eq!(paths(&config).len(), 2 + CREDENTIALS.len());
    }
}
