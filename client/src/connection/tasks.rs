//! Background tasks on a connection.
use dsh_policy::BashExecRequest;
use dsh_policy::task::{Cursor, TaskInfo, TaskOutput, WaitFor};
use dsh_policy::wire::{ClientMessage, ServerMessage};

use super::Connection;
use crate::error::ClientError;

impl Connection {
    /// Starts a command in the background; its `session` owns it.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when it is not started; then nothing is left of it.
    pub async fn start_task(&self, mut request: BashExecRequest) -> Result<TaskInfo, ClientError> {
        crate::ambient::attach(&mut request, &self.greeting.environment);
        request.background = true;
        let request = Box::new(request);
        let pick = |answer| match answer {
            ServerMessage::TaskStarted { task, .. } => Some(task),
            _ => None,
        };
        self.ask(|id| ClientMessage::Start { id, request }, pick).await
    }

    /// What a task has written since `cursor` (without one: since the last such read), after waiting for what `wait` says.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when `session` has no such task.
    pub async fn task_output(
        &self,
        session: Option<&str>,
        task: &str,
        cursor: Option<Cursor>,
        wait: WaitFor,
        timeout_ms: Option<u64>,
    ) -> Result<TaskOutput, ClientError> {
        let (session, task) = (session.map(str::to_owned), task.to_owned());
        let pick = |answer| match answer {
            ServerMessage::TaskOutput { output, .. } => Some(*output),
            _ => None,
        };
        let read = |id| ClientMessage::TaskRead {
            id,
            session,
            task,
            cursor,
            wait,
            timeout_ms,
        };
        self.ask(read, pick).await
    }

    /// The tasks of a session and those without one, oldest first.
    ///
    /// # Errors
    /// When the daemon is lost.
    pub async fn tasks(&self, session: Option<&str>) -> Result<Vec<TaskInfo>, ClientError> {
        let session = session.map(str::to_owned);
        let pick = |answer| match answer {
            ServerMessage::Tasks { tasks, .. } => Some(tasks),
            _ => None,
        };
        self.ask(|id| ClientMessage::TaskList { id, session }, pick).await
    }

    /// Asks for the end of a task. Gives the task as it was: terminal when it had ended already.
    ///
    /// # Errors
    /// [`ClientError::Exec`] when `session` has no such task.
    pub async fn kill_task(
        &self,
        session: Option<&str>,
        task: &str,
        reason: Option<&str>,
    ) -> Result<TaskInfo, ClientError> {
        let (session, task, reason) = (session.map(str::to_owned), task.to_owned(), reason.map(str::to_owned));
        let pick = |answer| match answer {
            ServerMessage::TaskKilled { task, .. } => Some(task),
            _ => None,
        };
        let kill = |id| ClientMessage::TaskKill {
            id,
            session,
            task,
            reason,
        };
        self.ask(kill, pick).await
    }

    /// Ends a session: all its tasks, and waits until nothing of them is left. Gives how many there were.
    ///
    /// # Errors
    /// When the daemon is lost.
    pub async fn end_session(&self, session: &str) -> Result<u32, ClientError> {
        let session = session.to_owned();
        let pick = |answer| match answer {
            ServerMessage::SessionEnded { tasks, .. } => Some(tasks),
            _ => None,
        };
        self.ask(|id| ClientMessage::SessionEnd { id, session }, pick).await
    }
}
