//! Where log lines go: the journal when systemd connected stderr to it, else stderr. One line per request; never a command or a value.
use std::os::fd::AsFd as _;
use std::sync::OnceLock;

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Registry, fmt, reload};

static LEVEL: OnceLock<reload::Handle<LevelFilter, Registry>> = OnceLock::new();

/// Starts logging at `level`. A second call only changes the level.
pub(crate) fn start(level: LevelFilter) {
    if let Some(handle) = LEVEL.get() {
        // Fails only when the subscriber is gone, which it never is.
        let _ = handle.reload(level);
        return;
    }
    let (filter, handle) = reload::Layer::new(level);
    let registry = tracing_subscriber::registry().with(filter);
    let journal = if stderr_is_the_journal() {
        tracing_journald::layer().ok()
    } else {
        None
    };
    let started = match journal {
        Some(journal) => registry.with(journal).try_init(),
        None => registry
            .with(
                fmt::layer()
                    .with_writer(std::io::stderr)
                    .with_ansi(false)
                    .with_target(false),
            )
            .try_init(),
    };
    if started.is_ok() {
        let _ = LEVEL.set(handle);
    }
}

/// systemd names the device and inode of the journal's stream; somebody may have redirected stderr since.
fn stderr_is_the_journal() -> bool {
    let Some(stream) = std::env::var("JOURNAL_STREAM").ok() else {
        return false;
    };
    let Some((device, inode)) = stream.split_once(':') else {
        return false;
    };
    rustix::fs::fstat(std::io::stderr().as_fd())
        .is_ok_and(|stat| device.parse() == Ok(stat.st_dev) && inode.parse() == Ok(stat.st_ino))
}

impl From<crate::config::LogLevel> for LevelFilter {
    fn from(level: crate::config::LogLevel) -> Self {
        use crate::config::LogLevel;
        match level {
            LogLevel::Off => Self::OFF,
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}
