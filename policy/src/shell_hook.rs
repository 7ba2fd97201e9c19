//! Variables that would change what a fresh `bash -c` runs, or that belong to the parent process and mean something wrong in a child.
//!
//! Names are given in ASCII upper case; `npm_config_…` and the like are matched through that too.
use crate::environment::contains;

/// Obeyed by bash (or the shells that a script may call) before or while it runs a command.
const SHELL: [&[u8]; 23] = [
    b"BASH_COMPAT",
    b"BASH_ENV",
    b"BASH_LOADABLES_PATH",
    b"BASH_XTRACEFD",
    b"BASHOPTS",
    b"CDPATH",
    b"ENV",
    b"EXECIGNORE",
    b"FIGNORE",
    b"FPATH",
    b"GLOBIGNORE",
    b"GLOBSORT",
    b"IFS",
    b"POSIXLY_CORRECT",
    b"PROMPT_COMMAND",
    b"PS0",
    b"PS1",
    b"PS2",
    b"PS3",
    b"PS4",
    b"SHELLOPTS",
    b"TMOUT",
    b"ZDOTDIR",
];

/// Code that the dynamic loader or the C library brings into every program. `LD_LIBRARY_PATH` is not code by itself and stays.
const LOADER: [&[u8]; 8] = [
    b"GCONV_PATH",
    b"LD_AUDIT",
    b"LD_DEBUG",
    b"LD_DEBUG_OUTPUT",
    b"LD_PRELOAD",
    b"LD_PROFILE",
    b"LD_PROFILE_OUTPUT",
    b"LD_SHOW_AUXV",
];

/// Programs and settings that git runs or trusts, and the repository that a parent git (a hook) was working on.
const GIT: [&[u8]; 19] = [
    b"GIT_ALTERNATE_OBJECT_DIRECTORIES",
    b"GIT_COMMON_DIR",
    b"GIT_CONFIG",
    b"GIT_DIR",
    b"GIT_EXEC_PATH",
    b"GIT_EXTERNAL_DIFF",
    b"GIT_GRAFT_FILE",
    b"GIT_IMPLICIT_WORK_TREE",
    b"GIT_INDEX_FILE",
    b"GIT_NAMESPACE",
    b"GIT_OBJECT_DIRECTORY",
    b"GIT_PREFIX",
    b"GIT_PROXY_COMMAND",
    b"GIT_REPLACE_REF_BASE",
    b"GIT_SHALLOW_FILE",
    b"GIT_SSH",
    b"GIT_SSH_COMMAND",
    b"GIT_TEMPLATE_DIR",
    b"GIT_WORK_TREE",
];

/// Code that an interpreter or make runs before the first line of a program.
const INTERPRETER: [&[u8]; 6] = [
    b"MAKEFILES",
    b"PERL5DB",
    b"PERL5OPT",
    b"PYTHONINSPECT",
    b"PYTHONSTARTUP",
    b"RSYNC_RSH",
];

/// The parent's own: sockets and pipes that a service manager or make gave to it, and a request for colours that contradicts step 3.
const PARENT: [&[u8]; 13] = [
    b"CLICOLOR_FORCE",
    b"FORCE_COLOR",
    b"JOURNAL_STREAM",
    b"LISTEN_FDNAMES",
    b"LISTEN_FDS",
    b"LISTEN_PID",
    b"MAINPID",
    b"MAKELEVEL",
    b"MANAGERPID",
    b"NOTIFY_SOCKET",
    b"SYSTEMD_EXEC_PID",
    b"WATCHDOG_PID",
    b"WATCHDOG_USEC",
];

/// Every name that starts so: exported functions, git settings, Lua's start-up code by version.
const PREFIXES: [&[u8]; 3] = [b"BASH_FUNC_", b"GIT_CONFIG_", b"LUA_INIT"];

/// Names, and the words in their values that make them a hook.
type Options = (&'static [&'static [u8]], &'static [&'static [u8]]);

/// Options that are fine (`--max-old-space-size`) unless they load code or name a descriptor of the parent.
const OPTIONS: [Options; 4] = [
    (
        &[b"NODE_OPTIONS"],
        &[
            b"-r ",
            b"--require",
            b"--import",
            b"--loader",
            b"--experimental-loader",
            b"--inspect",
        ],
    ),
    (
        &[
            b"JAVA_TOOL_OPTIONS",
            b"_JAVA_OPTIONS",
            b"JDK_JAVA_OPTIONS",
            b"MAVEN_OPTS",
            b"GRADLE_OPTS",
            b"SBT_OPTS",
        ],
        &[
            b"-javaagent",
            b"-agentlib",
            b"-agentpath",
            b"-Xbootclasspath",
            b"-XX:OnError",
            b"-XX:OnOutOfMemoryError",
        ],
    ),
    (&[b"RUBYOPT"], &[b"-r", b"-S"]),
    (
        &[b"MAKEFLAGS", b"MFLAGS", b"CARGO_MAKEFLAGS", b"GNUMAKEFLAGS"],
        &[b"jobserver", b"--eval"],
    ),
];

/// Whether a variable would change what a fresh shell runs.
pub(crate) fn is_hook(upper: &[u8], value: &[u8]) -> bool {
    [&SHELL[..], &LOADER, &GIT, &INTERPRETER, &PARENT]
        .iter()
        .any(|group| group.contains(&upper))
        || PREFIXES.iter().any(|prefix| upper.starts_with(prefix))
        || OPTIONS
            .iter()
            .any(|(names, words)| names.contains(&upper) && words.iter().any(|word| contains(value, word)))
        || is_function(value)
}

/// A function as old and other shells export it, under any name.
fn is_function(value: &[u8]) -> bool {
    value
        .strip_prefix(b"()")
        .is_some_and(|rest| rest.trim_ascii_start().starts_with(b"{"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(name: &str, value: &str) -> bool {
        is_hook(name.as_bytes(), value.as_bytes())
    }

    #[test]
    fn what_runs_before_the_command_goes() {
        for name in [
            "BASH_ENV",
            "ENV",
            "PROMPT_COMMAND",
            "BASH_FUNC_LS%%",
            "LD_PRELOAD",
            "LD_AUDIT",
            "GIT_CONFIG_COUNT",
            "GIT_CONFIG_PARAMETERS",
            "GIT_DIR",
            "NOTIFY_SOCKET",
        ] {
            assert!(hook(name, "x"), "{name}");
        }
        assert!(hook("ANYTHING", "() { :; }; echo vulnerable"));
    }

    #[test]
    fn options_go_only_when_they_load_code_or_name_a_descriptor() {
        assert!(hook("NODE_OPTIONS", "--require /x.js") && !hook("NODE_OPTIONS", "--max-old-space-size=8192"));
        assert!(hook("JAVA_TOOL_OPTIONS", "-javaagent:/x.jar") && !hook("JAVA_TOOL_OPTIONS", "-Xmx2g"));
        assert!(hook("MAKEFLAGS", " -j2 --jobserver-auth=3,4") && !hook("MAKEFLAGS", "-j8"));
    }

    #[test]
    fn where_programs_and_libraries_are_stays() {
        for name in [
            "PATH",
            "LD_LIBRARY_PATH",
            "PYTHONPATH",
            "EDITOR",
            "ENVIRONMENT",
            "GIT_AUTHOR_NAME",
            "BASH",
            "SHELL",
        ] {
            assert!(!hook(name, "/x"), "{name}");
        }
    }
}
