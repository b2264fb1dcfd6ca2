"""The errors that users meet. Each message says what was given, what is allowed and what to do."""


class VerifyError(Exception):
    """Anything that `verify` refuses; the command line turns it into exit code 2."""


class CaseError(VerifyError):
    """A case is declared wrongly, cannot be found, or cannot be set up."""


class InputFileError(VerifyError):
    """A file that was given cannot be read as what it should be. Names the file and the reason."""


class UnsupportedError(VerifyError):
    """What was asked for cannot be done on this machine or with this value."""
