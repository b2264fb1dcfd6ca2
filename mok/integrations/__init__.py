"""`mok` inside of other libraries, one module for each; none is imported before it is asked for."""
