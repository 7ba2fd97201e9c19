//! The text of a foreground result as a model reads it, and the way back from that text to an exit status.
//!
//! The text is made of sections: stdout, `[stderr]` and stderr, then one marker per line. Programs and models match on the markers, so every byte
//! of them is fixed.
use dsh_policy::result::{BashRunResult, SandboxReport, StreamResult};

const STDERR: &str = "[stderr]";
const NO_OUTPUT: &str = "(no output)";
const NO_FILE: &str = "(unavailable)";
const ESCALATION: &str = "[sandbox: escalation available — retry this exact command once with sandbox_permissions (the narrowest wider mode that suffices) + justification; the approval prompt asks the user]";
const EXIT_CODE: &str = "[exit code: ";
const SIGNAL: &str = "[killed by signal: ";

/// The text of `result`. `escalation_offered` adds the line that says how to ask for a wider mode, after a refusal.
///
/// ```
/// # let json = r#"{"exitCode":3,"signal":null,"timedOut":false,"aborted":false,"timeoutMs":120000,
/// #   "stdout":{"text":"building\n","truncated":false,"bytes":9},"stderr":{"text":"no rule","truncated":false,"bytes":7},
/// #   "sandbox":{"mode":"danger-full-access","denied":false},"environment":{"removed":[]},"survivors":0,
/// #   "usage":{"wallMs":1,"userMs":1,"systemMs":0,"maxRssKib":1}}"#;
/// # let result: dsh_policy::BashRunResult = dsh_policy::codec::from_json(json.as_bytes()).unwrap();
/// use dsh_client::tool::render::render_result;
///
/// assert_eq!(render_result(&result, false), "building\n[stderr]\nno rule\n[exit code: 3]");
/// ```
#[must_use]
pub fn render_result(result: &BashRunResult, escalation_offered: bool) -> String {
    let mut text = String::new();
    add_stream(&mut text, None, &result.stdout);
    add_stream(&mut text, Some(STDERR), &result.stderr);
    if text.is_empty() {
        text.push_str(NO_OUTPUT);
    }
    add_sandbox(&mut text, &result.sandbox, escalation_offered);
    if result.timed_out {
        add_section(&mut text, &format!("[timed out after {}ms]", result.timeout_ms));
    }
    if let Some(marker) = ExitStatus::of(result).marker() {
        add_section(&mut text, &marker);
    }
    text
}

/// A stream with its heading, and at its end the word that it was cut. One that nothing was written to is left out.
fn add_stream(text: &mut String, heading: Option<&str>, stream: &StreamResult) {
    if stream.text.is_empty() && !stream.truncated {
        return;
    }
    if let Some(heading) = heading {
        add_section(text, heading);
    }
    // A call may keep nothing of a stream; then only the marker is left of it.
    if !stream.text.is_empty() {
        add_section(text, &stream.text);
    }
    if stream.truncated {
        let path = stream
            .spill_path
            .as_ref()
            .map_or_else(|| NO_FILE.to_owned(), |path| path.display());
        add_section(text, &format!("[output truncated; full output: {path}]"));
    }
}

/// That something was refused, and how to ask for more.
pub(super) fn add_sandbox(text: &mut String, sandbox: &SandboxReport, escalation_offered: bool) {
    if sandbox.denied == Some(true) {
        add_section(text, &denied_marker(sandbox));
        if escalation_offered {
            add_section(text, ESCALATION);
        }
    }
}

/// Goes on on a line of its own. Output that ends in a newline has that already.
pub(super) fn add_section(text: &mut String, section: &str) {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(section);
}

/// What was refused: the network when nothing but sockets was, files otherwise.
fn denied_marker(sandbox: &SandboxReport) -> String {
    let denials = sandbox.confined.as_ref().map_or(&[][..], |confined| &confined.denials);
    let network_only = !denials.is_empty() && denials.iter().all(|fact| fact.operation.is_network());
    let what = if network_only { "network" } else { "file" };
    format!("[sandbox: {what} access denied under {} mode]", sandbox.mode)
}

/// How a shell ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// By itself, with this code.
    Exited(i32),
    /// By this signal (`SIGKILL`).
    Killed(String),
}

impl ExitStatus {
    fn of(result: &BashRunResult) -> Self {
        match &result.signal {
            Some(name) => Self::Killed(name.clone()),
            // Either is set; were it not so, no success must be told.
            None => Self::Exited(result.exit_code.unwrap_or(-1)),
        }
    }

    /// The last line of the text; a clean exit has none.
    fn marker(&self) -> Option<String> {
        match self {
            Self::Exited(0) => None,
            Self::Exited(code) => Some(format!("{EXIT_CODE}{code}]")),
            Self::Killed(name) => Some(format!("{SIGNAL}{name}]")),
        }
    }

    /// What a line says when it is exactly such a marker.
    fn from_marker(line: &str) -> Option<Self> {
        let inner = line.strip_suffix(']')?;
        let status = match inner.strip_prefix(EXIT_CODE) {
            Some(code) => Self::Exited(code.parse().ok()?),
            None => Self::Killed(
                inner
                    .strip_prefix(SIGNAL)
                    .filter(|name| is_signal_name(name))?
                    .to_owned(),
            ),
        };
        // `+3`, `03` and a clean exit are never written, so such a line is output.
        (status.marker().as_deref() == Some(line)).then_some(status)
    }
}

/// `SIGKILL`, `SIGRTMIN+3`.
fn is_signal_name(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'+';
    name.strip_prefix("SIG")
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(is_part))
}

/// A rendered text, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedText<'a> {
    /// The text without the marker of its exit; every other marker is still there.
    pub body: &'a str,
    /// How the shell ended.
    pub status: ExitStatus,
}

/// Takes the exit status off the end of a text of [`render_result`].
///
/// With `result` at hand its word counts: a last line of output that only looks like a marker stays in the body. Without it, for instance when an
/// old conversation is shown again, the text is all there is, and that line cannot be told apart.
#[must_use]
pub fn parse_exit_status<'a>(text: &'a str, result: Option<&BashRunResult>) -> ParsedText<'a> {
    let (before, last) = text.rsplit_once('\n').unwrap_or(("", text));
    let status = match result {
        Some(result) => ExitStatus::of(result),
        None => ExitStatus::from_marker(last).unwrap_or(ExitStatus::Exited(0)),
    };
    let has_marker = status.marker().as_deref() == Some(last);
    ParsedText {
        body: if has_marker { before } else { text },
        status,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dsh_policy::codec::from_json;

    const FILE: &str = "write-file";
    const SOCKET: &str = "connect";
    const READ_ONLY_FILE: &str = "[sandbox: file access denied under read-only mode]";

    /// A result as the daemon would send it: exit 0, nothing written, confined.
    fn result(stdout: &str, stderr: &str) -> BashRunResult {
        let mut result: BashRunResult = from_json(
            br#"{"exitCode":0,"signal":null,"timedOut":false,"aborted":false,"timeoutMs":120000,
                "stdout":{"text":"","truncated":false,"bytes":0},"stderr":{"text":"","truncated":false,"bytes":0},
                "sandbox":{"mode":"read-only","denied":false,"enforcement":"full","tier":"landlock","network":"full",
                "observed":true,"denials":[],"denialsDropped":0},"environment":{"removed":[]},"survivors":0,
                "usage":{"wallMs":1,"userMs":1,"systemMs":1,"maxRssKib":1}}"#,
        )
        .unwrap();
        result.stdout.text = stdout.into();
        result.stderr.text = stderr.into();
        result
    }

    fn exits(mut result: BashRunResult, code: i32) -> BashRunResult {
        result.exit_code = Some(code);
        result
    }

    fn killed(mut result: BashRunResult, signal: &str) -> BashRunResult {
        (result.exit_code, result.signal) = (None, Some(signal.into()));
        result
    }

    fn timed_out(mut result: BashRunResult) -> BashRunResult {
        (result.timed_out, result.timeout_ms) = (true, 500);
        result
    }

    fn denied(mut result: BashRunResult, mode: &str, operations: &[&str]) -> BashRunResult {
        let facts = operations.iter().map(|operation| {
            let json = format!(
                r#"{{"operation":"{operation}","syscall":"x","errno":"EACCES","rule":"confined","pid":1,"count":1}}"#
            );
            from_json(json.as_bytes()).unwrap()
        });
        result.sandbox.confined.as_mut().unwrap().denials = facts.collect();
        (result.sandbox.denied, result.sandbox.mode) = (Some(true), mode.parse().unwrap());
        result
    }

    fn cut(stream: &mut StreamResult, path: Option<&str>) {
        (stream.truncated, stream.spill_path) = (true, path.map(Into::into));
    }

    fn stdout_cut(mut result: BashRunResult, path: Option<&str>) -> BashRunResult {
        cut(&mut result.stdout, path);
        result
    }

    fn stderr_cut(mut result: BashRunResult, path: Option<&str>) -> BashRunResult {
        cut(&mut result.stderr, path);
        result
    }

    #[track_caller]
    fn assert_all(cases: &[(&str, BashRunResult, &str)]) {
        for (name, result, expected) in cases {
            assert_eq!(render_result(result, false), *expected, "{name}");
        }
    }

    #[test]
    fn streams_are_separated_by_one_newline_and_keep_their_last_one() {
        assert_all(&[
            ("nothing", result("", ""), "(no output)"),
            (
                "nothing, failed",
                exits(result("", ""), 1),
                "(no output)\n[exit code: 1]",
            ),
            ("no newline", result("a", ""), "a"),
            ("newline kept", result("a\n", ""), "a\n"),
            ("blank lines kept", result("a\n\n", ""), "a\n\n"),
            ("only a newline", result("\n", ""), "\n"),
            ("stderr alone", result("", "e\n"), "[stderr]\ne\n"),
            ("both, no newlines", result("a", "e"), "a\n[stderr]\ne"),
            ("both, newlines", result("a\n", "e\n"), "a\n[stderr]\ne\n"),
            (
                "newline before a marker",
                exits(result("a\n", ""), 2),
                "a\n[exit code: 2]",
            ),
            ("none before a marker", exits(result("a", ""), 2), "a\n[exit code: 2]"),
            (
                "after stderr",
                exits(result("a", "e\n"), 2),
                "a\n[stderr]\ne\n[exit code: 2]",
            ),
        ]);
    }

    #[test]
    fn a_cut_stream_says_so_at_its_own_end() {
        let marker = "[output truncated; full output: /s/1]";
        let none = "[output truncated; full output: (unavailable)]";
        assert_all(&[
            (
                "stdout",
                stdout_cut(result("a\n", ""), Some("/s/1")),
                &format!("a\n{marker}"),
            ),
            (
                "stdout, no file",
                stdout_cut(result("a", ""), None),
                &format!("a\n{none}"),
            ),
            (
                "stdout before stderr",
                stdout_cut(result("a", "e\n"), Some("/s/1")),
                &format!("a\n{marker}\n[stderr]\ne\n"),
            ),
            (
                "stderr",
                stderr_cut(result("a\n", "e"), Some("/s/1")),
                &format!("a\n[stderr]\ne\n{marker}"),
            ),
            (
                "both",
                stderr_cut(stdout_cut(result("a", "e\n"), None), Some("/s/1")),
                &format!("a\n{none}\n[stderr]\ne\n{marker}"),
            ),
            ("nothing kept", stdout_cut(result("", ""), Some("/s/1")), marker),
            (
                "nothing kept of stderr",
                stderr_cut(result("", ""), Some("/s/1")),
                &format!("[stderr]\n{marker}"),
            ),
        ]);
    }

    #[test]
    fn a_refusal_names_what_and_the_mode() {
        let failed = || exits(result("", "no\n"), 1);
        let expected = |what: &str, mode: &str| {
            format!("[stderr]\nno\n[sandbox: {what} access denied under {mode} mode]\n[exit code: 1]")
        };
        let file = expected("file", "read-only");
        let network = expected("network", "workspace-write");
        assert_all(&[
            ("a file", denied(failed(), "read-only", &[FILE]), &file),
            ("both", denied(failed(), "read-only", &[SOCKET, FILE]), &file),
            ("something else", denied(failed(), "read-only", &["mount"]), &file),
            ("no fact kept", denied(failed(), "read-only", &[]), &file),
            (
                "sockets",
                denied(failed(), "workspace-write", &[SOCKET, "bind", "create-socket"]),
                &network,
            ),
            ("unix", denied(failed(), "workspace-write", &["connect-unix"]), &network),
        ]);
    }

    #[test]
    fn a_swallowed_or_unobserved_refusal_has_no_marker() {
        let mut swallowed = denied(result("a", ""), "read-only", &[FILE]);
        swallowed.sandbox.denied = Some(false);
        assert_eq!(render_result(&swallowed, true), "a");
        let mut unobserved = exits(result("a", ""), 1);
        unobserved.sandbox.denied = None;
        assert_eq!(render_result(&unobserved, true), "a\n[exit code: 1]");
    }

    #[test]
    fn escalation_follows_a_refusal_and_only_when_it_is_offered() {
        let refused = denied(exits(result("", ""), 1), "read-only", &[FILE]);
        let without = format!("(no output)\n{READ_ONLY_FILE}\n[exit code: 1]");
        assert_eq!(render_result(&refused, false), without);
        assert_eq!(
            render_result(&refused, true),
            format!(
                "(no output)\n{READ_ONLY_FILE}\n[sandbox: escalation available \u{2014} retry this exact command once with \
                 sandbox_permissions (the narrowest wider mode that suffices) + justification; the approval prompt asks the user]\n\
                 [exit code: 1]"
            )
        );
        assert_eq!(render_result(&exits(result("a", ""), 1), true), "a\n[exit code: 1]");
    }

    #[test]
    fn the_end_is_told_last() {
        assert_all(&[
            (
                "timeout, exit 0",
                timed_out(result("early\n", "")),
                "early\n[timed out after 500ms]",
            ),
            (
                "timeout, signal",
                timed_out(killed(result("early", ""), "SIGTERM")),
                "early\n[timed out after 500ms]\n[killed by signal: SIGTERM]",
            ),
            (
                "timeout, exit 7",
                timed_out(exits(result("", ""), 7)),
                "(no output)\n[timed out after 500ms]\n[exit code: 7]",
            ),
            (
                "signal",
                killed(result("", ""), "SIGKILL"),
                "(no output)\n[killed by signal: SIGKILL]",
            ),
            (
                "an exit code above 128 is one",
                exits(result("a", ""), 137),
                "a\n[exit code: 137]",
            ),
            (
                "signal, cut",
                killed(stdout_cut(result("a\n", ""), Some("/s/1")), "SIGSEGV"),
                "a\n[output truncated; full output: /s/1]\n[killed by signal: SIGSEGV]",
            ),
            (
                "everything",
                timed_out(exits(
                    denied(
                        stderr_cut(stdout_cut(result("a", "e"), Some("/s/1")), None),
                        "read-only",
                        &[FILE],
                    ),
                    1,
                )),
                "a\n[output truncated; full output: /s/1]\n[stderr]\ne\n[output truncated; full output: (unavailable)]\n\
                 [sandbox: file access denied under read-only mode]\n[timed out after 500ms]\n[exit code: 1]",
            ),
        ]);
    }

    fn exited(code: i32) -> ExitStatus {
        ExitStatus::Exited(code)
    }

    fn by(signal: &str) -> ExitStatus {
        ExitStatus::Killed(signal.into())
    }

    #[test]
    fn the_marker_of_the_exit_leaves_the_body_and_the_others_stay() {
        let cases = [
            ("a", "a", exited(0)),
            ("", "", exited(0)),
            ("a\n[exit code: 2]", "a", exited(2)),
            ("a\n[exit code: -1]", "a", exited(-1)),
            ("[exit code: 2]", "", exited(2)),
            ("a\n[killed by signal: SIGTERM]", "a", by("SIGTERM")),
            ("a\n[killed by signal: SIGRTMIN+3]", "a", by("SIGRTMIN+3")),
            ("a\n[timed out after 5ms]", "a\n[timed out after 5ms]", exited(0)),
            (
                "a\n[timed out after 5ms]\n[exit code: 1]",
                "a\n[timed out after 5ms]",
                exited(1),
            ),
            ("[exit code: 1]\nmore", "[exit code: 1]\nmore", exited(0)),
        ];
        for (text, body, status) in cases {
            assert_eq!(parse_exit_status(text, None), ParsedText { body, status }, "{text:?}");
        }
    }

    #[test]
    fn what_is_not_exactly_a_marker_is_output() {
        for text in [
            "[exit code: 0]",
            "[exit code: 02]",
            "[exit code: +2]",
            "[exit code: ]",
            "[exit code: 99999999999]",
            "[exit code: 2] ",
            "[exit code: 2]\n",
            " [exit code: 2]",
            "[exit code: 2",
            "[killed by signal: ]",
            "[killed by signal: SIG]",
            "[killed by signal: sigterm]",
            "[killed by signal: SIGTERM] [x]",
        ] {
            let parsed = parse_exit_status(text, None);
            assert_eq!((parsed.body, parsed.status), (text, exited(0)), "{text:?}");
        }
    }

    #[test]
    fn the_result_knows_better_than_a_line_that_looks_like_a_marker() {
        let clean = result("[exit code: 3]", "");
        let text = render_result(&clean, false);
        assert_eq!(
            parse_exit_status(&text, None).status,
            exited(3),
            "the text alone cannot tell"
        );
        let parsed = parse_exit_status(&text, Some(&clean));
        assert_eq!((parsed.body, parsed.status), ("[exit code: 3]", exited(0)));

        let failed = exits(result("[exit code: 3]", ""), 4);
        let text = render_result(&failed, false);
        let parsed = parse_exit_status(&text, Some(&failed));
        assert_eq!((parsed.body, parsed.status), ("[exit code: 3]", exited(4)));
    }

    #[test]
    fn every_rendered_end_is_read_back() {
        for status in [exited(1), exited(255), by("SIGKILL"), by("SIGRTMIN+15"), by("SIGRTMAX")] {
            let ended = match &status {
                ExitStatus::Exited(code) => exits(result("a\n", "e\n"), *code),
                ExitStatus::Killed(name) => killed(result("a\n", "e\n"), name),
            };
            let text = render_result(&ended, false);
            for at_hand in [None, Some(&ended)] {
                let parsed = parse_exit_status(&text, at_hand);
                assert_eq!((parsed.body, &parsed.status), ("a\n[stderr]\ne", &status));
            }
        }
    }
}
