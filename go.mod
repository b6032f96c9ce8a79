module forgeci

go 1.26.8
